"""The public training API: `pretrainax.open` for your own training loop, `pretrainax.train` for a complete run.

    run = pretrainax.open(experiment)
    state = run.init()
    for step, batch in run.batches(start=0, steps=100):
        state, metrics = run.step(state, batch)

docs/how-to/own-code.md shows how to use your own loop, loss, model or callbacks.
"""

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

import jax

from pretrainax.config import Experiment, UserError
from pretrainax.config.validation import complete, validate
from pretrainax.data.batch import Batch
from pretrainax.data.pipeline import iterate
from pretrainax.files.paths import path_problem
from pretrainax.models import AnyModel
from pretrainax.planning.current_devices import ResolveRemat
from pretrainax.planning.memory_check import MemoryCheck
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
    """A run that is ready to train, with its model, mesh, data and jitted training step."""

    def __init__(self, run: Run):
        self._run = run

    @property
    def experiment(self) -> Experiment:
        """Returns the run's config, with "auto" values resolved."""
        return self._run.experiment

    @property
    def model(self) -> AnyModel:
        """Returns the Flax model; `model.apply({"params": …}, batch, deterministic=…)` computes the model outputs."""
        return self._run.model

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Returns the JAX mesh over all of the run's devices."""
        return self._run.mesh

    @property
    def tokenizer(self) -> Tokenizer:
        """Returns the run's tokenizer."""
        return self._run.prepared.tokenizer

    def init(self) -> TrainState:
        """Creates the initial training state, with random parameters, or from `config.checkpoint.init_from`."""
        run = self._run
        with jax.set_mesh(run.mesh):
            params = run.start.params(run, "")
            return run.fresh_state() if params is None else run.state_of(params)

    def batches(self, start: int = 0, steps: Optional[int] = None) -> Iterator[tuple[int, Batch]]:
        """Yields (step, batch) for steps `start` to `start + steps - 1`, counting from 0.

        The arrays of a batch are already on the devices. A batch depends only on the seed and the step. To continue
        from a checkpoint, set `start` to its step.

        Args:
          start: the first step, i.e. the number of steps to skip.
          steps: number of batches to yield. If None, yields all remaining steps of the run.

        Raises:
          UserError: the steps lie outside the run.
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
        """Runs one training step on a batch, and returns the new state and the step's metrics.

        The buffers of `state` are donated, so `state` cannot be used afterwards. The metrics are device arrays;
        `host_metrics` copies them to the host.

        Raises:
          UserError: the state was passed to an earlier step.
        """
        _check_buffers(state)
        with jax.set_mesh(self.mesh):
            return self._run.step(state, batch, self._run.frozen)

    @staticmethod
    def host_metrics(metrics: Mapping[str, PyTree]) -> dict[str, float]:
        """Copies a step's metrics to the host and returns them as floats. Blocks until the step is done."""
        values = jax.device_get(metrics)
        scalars = {name: float(values[name]) for name in ("learning_rate", "gradient_norm")}
        return summarize(values["sums"]) | scalars

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Computes the validation metrics of a state, exactly as during training.

        Raises:
          UserError: the state was passed to a step.
        """
        _check_buffers(state)
        with jax.set_mesh(self.mesh):
            return self._run.validate(self._run.validated(state))


def open(
    experiment: Experiment, *, extra_loss: Optional[ExtraLoss] = None, model: Optional[BuildModel] = None
) -> OpenRun:
    """Prepares the data and builds the model, mesh and training step of a run; does not train or write a workdir.

    Args:
      experiment: the config of the run; not modified.
      extra_loss: function (outputs, batch) -> {name: (sum, count)} of losses to add to the objective; see `ExtraLoss`.
      model: function (config.model, compute) -> Linen module that replaces the model; see `BuildModel`.

    Raises:
      UserError: the config or the input is invalid, or the config has phases, tuning or distill.
    """
    experiment = _initialize(experiment)
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
    workdir: str | os.PathLike[str],
    *,
    callbacks: Sequence[Callback] = (),
    extra_loss: Optional[ExtraLoss] = None,
    model: Optional[BuildModel] = None,
    extend: bool = False,
    check_memory: bool = True,
) -> int:
    """Trains a complete run, like `python -m pretrainax.main`, and returns the exit code.

    The run resumes from its newest checkpoint if there is one, and it logs, evaluates and saves as the config says.

    Args:
      experiment: the config of the run; not modified.
      workdir: the run's folder, or the URL of a folder in an object store.
      callbacks: callbacks to call in addition to those in the config.
      extra_loss: function (outputs, batch) -> {name: (sum, count)} of losses to add to the objective; see `ExtraLoss`.
      model: function (config.model, compute) -> Linen module that replaces the model; see `BuildModel`.
      extend: whether raising the number of steps of an existing run may change the learning rates, or the mixture of
        datasets, of steps that are already done; the same as the flag --extend.
      check_memory: whether to raise UserError for a run whose estimated memory exceeds the memory of a device, as
        without the flag --nocheck_memory; if False, or with your own `model`, there is only a warning, or no check.

    Raises:
      UserError: the config or the input is invalid.
      RunFailed: the run failed.
    """
    workdir = os.path.expanduser(os.fspath(workdir))
    if problem := path_problem(workdir):
        raise UserError(f"workdir is {workdir!r}: {problem}")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(f"callbacks has {callback!r}, each must be an object of a subclass of pretrainax.Callback")
    experiment = _initialize(experiment)
    check_custom(experiment, extra_loss, model)
    with folders.local_folder(workdir, experiment.checkpoint.local_dir) as folder:
        return train_run(
            experiment,
            folder,
            extend=extend,
            callbacks=[ResolveRemat(), *([MemoryCheck(check_memory)] if model is None else []), *callbacks],
            start=CustomStart(extra_loss, model),
        )


def _initialize(experiment: Experiment) -> Experiment:
    """Validates a copy of a config and starts JAX with its settings, as the commands do; returns the copy.

    The run resolves "auto" values and the budget in the copy, so the caller's config can configure other runs.
    """
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"experiment is {experiment!r}, it must be an Experiment: pretrainax.config.config_file.read_config_file "
            "reads the one of a config"
        )
    experiment = copy.deepcopy(experiment, {id(callback): callback for callback in experiment.callbacks})
    complete(experiment)
    validate(experiment)
    host.tune_malloc()
    host.start_jax(experiment)
    return experiment


def _check_buffers(state: TrainState) -> None:
    """Raises UserError if `step` has donated the state; on several devices of a CPU, JAX would wait forever."""
    if any(isinstance(array, jax.Array) and array.is_deleted() for array in jax.tree.leaves(state)):
        raise UserError("run.step has donated the buffers of this state: use the state that run.step returned")
