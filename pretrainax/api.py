"""The public training API: `pretrainax.open` for a loop of one's own, `pretrainax.train` for the whole program.

    run = pretrainax.open(experiment)
    state = run.init()
    for step, batch in run.batches(start=0, steps=100):
        state, metrics = run.step(state, batch)

docs/extending.md shows each way to put one's own code into a run.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

import jax

from pretrainax.config import Experiment, UserError
from pretrainax.config.validation import complete, validate
from pretrainax.data.batch import Batch
from pretrainax.data.pipeline import iterate
from pretrainax.models import AnyModel
from pretrainax.planning.here import SettledHere
from pretrainax.runs.own_model import BuildModel, ExtraLoss, OwnStart, check_own
from pretrainax.runs.train import open_run
from pretrainax.runs.train import train as train_run
from pretrainax.runtime import folders, host
from pretrainax.sharding.param_paths import PyTree
from pretrainax.tokenization.base import Tokenizer
from pretrainax.training.callbacks import Callback
from pretrainax.training.loop import to_device
from pretrainax.training.metrics import summarize
from pretrainax.training.run import Run
from pretrainax.training.train_step import TrainState


class OpenRun:
    """A run of which nothing is trained yet: its model, mesh, data and jitted steps."""

    def __init__(self, run: Run):
        self._run = run

    @property
    def experiment(self) -> Experiment:
        """Returns the config, with numbers where it had "auto"."""
        return self._run.experiment

    @property
    def model(self) -> AnyModel:
        """Returns the model in training: `model.apply({"params": …}, batch, deterministic=…)` gives its outputs."""
        return self._run.model

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Returns the mesh of all devices."""
        return self._run.mesh

    @property
    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of the text."""
        return self._run.prepared.tokenizer

    def init(self) -> TrainState:
        """Returns the state before the first step: drawn parameters, or those of `config.checkpoint.init_from`."""
        run = self._run
        with jax.set_mesh(run.mesh):
            params = run.start.params(run, "")
            return run.fresh_state() if params is None else run.state_of(params)

    def batches(self, start: int = 0, steps: Optional[int] = None) -> Iterator[tuple[int, Batch]]:
        """Yields (step, batch) of `steps` steps after the first `start`, on the devices; None: to the run's end.

        A batch is a function of the seed and its step: to go on from a checkpoint is to start at its step.
        """
        run, end = self._run, self.experiment.train.steps
        stop = end if steps is None else start + steps
        if not 0 <= start <= stop <= end:
            raise UserError(f"steps {start} to {stop} are asked for, and the run has {end}: raise config.train.steps")
        batches = iterate(run.train_batches, start, stop, self.experiment.data.workers or 0)
        yield from enumerate(to_device(batches, run.mesh), start)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Mapping[str, PyTree]]:
        """Makes one update; the state is donated. The metrics stay on the device: `figures` reads them."""
        with jax.set_mesh(self.mesh):
            return self._run.step(state, batch, self._run.frozen)

    @staticmethod
    def figures(metrics: Mapping[str, PyTree]) -> dict[str, float]:
        """Returns the metrics of a step as numbers; waits for the devices."""
        found = jax.device_get(metrics)
        rates = {name: float(found[name]) for name in ("learning_rate", "gradient_norm")}
        return summarize(found["sums"]) | rates

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Returns the metrics of the validation split."""
        with jax.set_mesh(self.mesh):
            return self._run.validate(self._run.validated(state))


def open(
    experiment: Experiment, *, extra_loss: Optional[ExtraLoss] = None, model: Optional[BuildModel] = None
) -> OpenRun:
    """Prepares the data and builds model, mesh and steps of a run; trains nothing and writes no run's folder.

    Args:
      extra_loss: see `ExtraLoss`.
      model: see `BuildModel`.

    Raises:
      UserError: as a command does, in one line.
    """
    _make_ready(experiment)
    if experiment.phases or experiment.tuning is not None or experiment.distill is not None:
        raise UserError(
            "config.phases, tuning and distill are for pretrainax.train, which has a folder for what they remember: "
            "set them to () and None"
        )
    check_own(experiment, extra_loss, model)
    with open_run(experiment, start=OwnStart(extra_loss, model)) as run:
        return OpenRun(run)


def train(
    experiment: Experiment,
    workdir: str,
    *,
    callbacks: Sequence[Callback] = (),
    extra_loss: Optional[ExtraLoss] = None,
    model: Optional[BuildModel] = None,
    extend: bool = False,
) -> int:
    """Trains as `python -m pretrainax.main` does: it resumes, logs, evaluates and saves. Returns the exit code.

    Args:
      workdir: folder of the run; also of an object store, by its URL.
      callbacks: beside those of the config.
      extra_loss: see `ExtraLoss`.
      model: see `BuildModel`.
      extend: the run may go on past its planned end, whatever else that changes.

    Raises:
      UserError: a bad config or input, in one line.
      RunFailed: likewise.
    """
    _make_ready(experiment)
    check_own(experiment, extra_loss, model)
    with folders.at_work(workdir, experiment.checkpoint.local_dir) as folder:
        return train_run(
            experiment,
            folder,
            extend=extend,
            callbacks=[SettledHere(), *callbacks],
            start=OwnStart(extra_loss, model),
        )


def _make_ready(experiment: Experiment) -> None:
    """Checks a config as a command does, and starts JAX for it."""
    complete(experiment)
    validate(experiment)
    host.tune_malloc()
    host.start_jax(experiment)
