"""The public training API: `pretrainax.open` for your own training loop, `pretrainax.train` for a complete run.

    run = pretrainax.open(experiment)
    state = run.init()
    for step, batch in run.batches(start=0, steps=100):
        state, metrics = run.step(state, batch)

docs/how-to/own-code.md shows how to use your own loop, loss, model or callbacks.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

import jax

from pretrainax.config import Experiment, UserError
from pretrainax.config.validation import complete, validate
from pretrainax.data.batch import Batch
from pretrainax.data.pipeline import iterate
from pretrainax.models import AnyModel
from pretrainax.planning.current_devices import ResolveRemat
from pretrainax.runs.custom_model import BuildModel, CustomStart, ExtraLoss, check_custom
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
    """A run that is ready to train, with its model, mesh, data and jitted steps."""

    def __init__(self, run: Run):
        self._run = run

    @property
    def experiment(self) -> Experiment:
        """Returns the config of the run, in which numbers replace the "auto" values."""
        return self._run.experiment

    @property
    def model(self) -> AnyModel:
        """Returns the model; `model.apply({"params": …}, batch, deterministic=…)` returns the outputs of the model."""
        return self._run.model

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Returns the JAX mesh, which contains all devices of the run."""
        return self._run.mesh

    @property
    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of the run."""
        return self._run.prepared.tokenizer

    def init(self) -> TrainState:
        """Returns the initial training state, with random parameters or those of `config.checkpoint.init_from`."""
        run = self._run
        with jax.set_mesh(run.mesh):
            params = run.start.params(run, "")
            return run.fresh_state() if params is None else run.state_of(params)

    def batches(self, start: int = 0, steps: Optional[int] = None) -> Iterator[tuple[int, Batch]]:
        """Yields (step, batch) for the steps from `start` to `start + steps - 1`, counted from 0.

        The batches are on the devices. A batch depends only on the seed and the step. To continue from a checkpoint,
        set `start` to the step of the checkpoint.

        Args:
          start: number of steps to skip.
          steps: number of steps; None: all remaining steps of the run.
        """
        run, end = self._run, self.experiment.train.steps
        stop = end if steps is None else start + steps
        if not 0 <= start <= stop <= end:
            raise UserError(
                f"steps {start} to {stop} are not within the {end} steps of the run: raise config.train.steps"
            )
        batches = iterate(run.train_batches, start, stop, self.experiment.data.workers or 0)
        yield from enumerate(to_device(batches, run.mesh), start)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Mapping[str, PyTree]]:
        """Makes one update. Returns the new state and the metrics of the step.

        The buffers of `state` are donated, so `state` cannot be used afterwards. The metrics stay on the devices until
        `host_metrics` reads them.
        """
        with jax.set_mesh(self.mesh):
            return self._run.step(state, batch, self._run.frozen)

    @staticmethod
    def host_metrics(metrics: Mapping[str, PyTree]) -> dict[str, float]:
        """Returns the metrics of a step as numbers. Waits until the devices have computed them."""
        values = jax.device_get(metrics)
        others = {name: float(values[name]) for name in ("learning_rate", "gradient_norm")}
        return summarize(values["sums"]) | others

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Computes the metrics of a state on the validation split, as the validation of the run does."""
        with jax.set_mesh(self.mesh):
            return self._run.validate(self._run.validated(state))


def open(
    experiment: Experiment, *, extra_loss: Optional[ExtraLoss] = None, model: Optional[BuildModel] = None
) -> OpenRun:
    """Prepares the data and builds the model, mesh and steps of a run. Does not train and does not write a workdir.

    Args:
      extra_loss: function (outputs, batch) -> {name: (sum, count)} of losses to add to the objective; see `ExtraLoss`.
      model: function (config.model, compute) -> Linen module that replaces the model; see `BuildModel`.

    Raises:
      UserError: invalid config or input.
    """
    _make_ready(experiment)
    if experiment.phases or experiment.tuning is not None or experiment.distill is not None:
        raise UserError(
            "pretrainax.open does not support config.phases, config.tuning and config.distill, which need a workdir: "
            "set them to (), None and None, or use pretrainax.train"
        )
    check_custom(experiment, extra_loss, model)
    with open_run(experiment, start=CustomStart(extra_loss, model)) as run:
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
    """Trains like `python -m pretrainax.main`: resumes, logs, evaluates and saves. Returns the exit code.

    Args:
      workdir: folder of the run, or URL of a folder in an object store.
      callbacks: in addition to the callbacks of the config.
      extra_loss: function (outputs, batch) -> {name: (sum, count)} of losses to add to the objective; see `ExtraLoss`.
      model: function (config.model, compute) -> Linen module that replaces the model; see `BuildModel`.
      extend: as the flag --extend: a run with more steps than before may change its learning rates or mixture.

    Raises:
      UserError: invalid config or input.
      RunFailed: the run failed.
    """
    _make_ready(experiment)
    check_custom(experiment, extra_loss, model)
    with folders.local_folder(workdir, experiment.checkpoint.local_dir) as folder:
        return train_run(
            experiment,
            folder,
            extend=extend,
            callbacks=[ResolveRemat(), *callbacks],
            start=CustomStart(extra_loss, model),
        )


def _make_ready(experiment: Experiment) -> None:
    """Validates a config as the commands do, and starts JAX with the settings of the config."""
    complete(experiment)
    validate(experiment)
    host.tune_malloc()
    host.start_jax(experiment)
