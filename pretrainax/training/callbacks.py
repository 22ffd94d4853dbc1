"""Defines callbacks: code of this package or of users that a run calls between its steps.

    @dataclasses.dataclass
    class Histogram(Callback):
        every: int = 100

        def on_step(self, loop, state, metrics):
            if loop.step % self.every == 0:
                loop.note(str(jax.tree.map(jnp.std, state.params)))

`config.callbacks` contains the callbacks of a config. Like each `Choice`, their classes are found by entry points. All
processes of a run call all methods, so a method may compute with sharded arrays. A method must call `Loop.stop` and
`Loop.request` in all processes or in none.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Optional

from pretrainax.config import Experiment, RunFailed, UserError, kinds
from pretrainax.data.batch import HostBatch
from pretrainax.runtime.goodput import Goodput
from pretrainax.sharding.param_paths import PyTree
from pretrainax.training.loss_spikes import Spike
from pretrainax.training.start import Row
from pretrainax.training.train_step import TrainState

if TYPE_CHECKING:  # these modules import this module
    from pretrainax.training.loop import Loop
    from pretrainax.training.run import Run


class Callback(kinds.Callback):
    """Base class of callbacks: a subclass overrides the methods that it needs.

    An exception in a callback ends the run with a one-line error. An exception in `on_end`, when the run is saved, is
    logged instead (see `finish`). The goodput table shows the time of each callback.
    """

    part: ClassVar[Optional[str]] = None  # row of the goodput table; None: its own row; "": the row of the steps
    label: ClassVar[str] = ""  # name in messages; "": the class name

    def resolve_fields(self, experiment: Experiment) -> None:
        """Sets fields that depend on the devices; runs after JAX finds the devices and before the data is prepared."""

    def rows(self, run: "Run") -> Iterable[Row]:
        """Returns rows for the header of the run."""
        return ()

    def on_batch(self, step: int, batch: HostBatch) -> None:
        """Receives this process's rows of each batch, in the loader thread, as soon as the batch is ready."""

    def on_start(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs before the first step of each process, also when a run is resumed; `metrics` is empty."""

    def before_step(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs before step `loop.step + 1`; `metrics` is empty."""

    def on_step(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs after each update. The metrics are still on the device, so reading them blocks."""

    def log_metrics(self, loop: "Loop", state: TrainState) -> Mapping[str, object]:
        """Returns extra metrics for a line of training metrics, for example from `loop.sums`: numbers, or dicts."""
        return {}

    def on_log(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs after a line of training metrics is logged."""

    def evaluation_metrics(self, loop: "Loop", state: TrainState) -> Mapping[str, float]:
        """Returns extra validation metrics; the run adds them to the metrics of the objective."""
        return {}

    def on_evaluate(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs after a validation."""

    def on_save(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs after the save of a checkpoint is started, with the validation metrics of its step; {} if none."""

    def on_rollback(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs after a rollback to `loop.step`, with the restored state; `metrics` is empty."""

    def on_text(self, loop: "Loop", name: str, text: str) -> None:
        """Receives a text about the model, such as samples."""

    def on_end(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs after the last step is saved, with the validation metrics of this step."""

    def close(self) -> None:
        """Runs last, even after an exception."""


class Callbacks:
    """Calls the methods of all callbacks of a run, in order."""

    def __init__(self, callbacks: Sequence[Callback], goodput: Goodput):
        self.all, self._goodput = tuple(callbacks), goodput

    def overriding(self, method: str) -> list[Callback]:
        """Returns the callbacks that override the method of this name."""
        return [each for each in self.all if getattr(type(each), method) is not getattr(Callback, method)]

    def call(self, method: str, *args: object) -> list:
        """Calls a method of all callbacks that override this method, and returns the results in order.

        Raises:
          RunFailed: a callback raised an exception other than UserError, RunFailed or Spike.
        """
        return [self._call(each, method, self.timed(each), *args) for each in self.overriding(method)]

    def call_untimed(self, method: str, *args: object) -> None:
        """Calls a method as `call` does, but does not add its time to the goodput table; for other threads."""
        for each in self.overriding(method):
            self._call(each, method, contextlib.nullcontext(), *args)

    def timed(self, callback: Callback) -> contextlib.AbstractContextManager:
        """Returns a context whose time the goodput table counts for the callback."""
        part = f"callback {name_of(callback)}" if callback.part is None else callback.part
        return self._goodput.on(part) if part else contextlib.nullcontext()

    @staticmethod
    def _call(callback: Callback, method: str, timer: contextlib.AbstractContextManager, *args: object):
        with timer:
            try:
                return getattr(callback, method)(*args)
            except (UserError, RunFailed, Spike):
                raise
            except Exception as error:
                raise RunFailed(f"callback {name_of(callback)}.{method} failed: {describe_error(error)}") from error

    @contextlib.contextmanager
    def closing(self) -> Iterator["Callbacks"]:
        """Returns a context that calls `close` of all callbacks on exit."""
        with contextlib.ExitStack() as stack:
            for each in self.overriding("close"):
                stack.callback(each.close)
            yield self


def name_of(callback: Callback) -> str:
    """Returns the name of a callback for messages: its `label`, or the name of its class."""
    return callback.label or type(callback).__name__


def describe_error(error: Exception) -> str:
    """Returns the type and the message of an exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
