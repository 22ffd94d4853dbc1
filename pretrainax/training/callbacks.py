"""Defines callbacks: code of PretrainAX or its users that a training run calls between steps.

    @dataclasses.dataclass
    class Histogram(Callback):
        every: int = 100

        def on_step(self, loop, state, metrics):
            if loop.step % self.every == 0:
                loop.note(str(jax.tree.map(jnp.std, state.params)))

`config.callbacks` lists the callbacks of a config. Like the classes of every `Choice`, callback classes are found
through entry points. All processes of a run call all methods, so a method may compute with sharded arrays. A method
must call `Loop.stop` and `Loop.request` in all processes or in none.
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

    part: ClassVar[Optional[str]] = None  # row of the goodput table; None: a separate row; "": the row "steps"
    label: ClassVar[str] = ""  # name in messages; "": the class name

    def resolve_fields(self, experiment: Experiment) -> None:
        """Sets config fields that depend on the devices; runs after JAX finds the devices, before data preparation."""

    def rows(self, run: "Run") -> Iterable[Row]:
        """Returns additional (name, value) rows for the run's header."""
        return ()

    def on_batch(self, step: int, batch: HostBatch) -> None:
        """Receives this process's rows of each batch as soon as they are ready; called in the loader thread."""

    def on_start(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs before the first step of this process, in both new and resumed runs; `metrics` is empty."""

    def before_step(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs before step `loop.step + 1`; `metrics` is empty."""

    def on_step(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs after each update is dispatched; reading `metrics` blocks until the devices have finished the update."""

    def log_metrics(self, loop: "Loop", state: TrainState) -> Mapping[str, object]:
        """Returns additional training metrics (numbers or dicts) to log, computed for example from `loop.sums`."""
        return {}

    def on_log(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs after training metrics are logged, with the logged metrics."""

    def evaluation_metrics(self, loop: "Loop", state: TrainState) -> Mapping[str, object]:
        """Returns additional validation metrics (numbers or dicts) to log; only numbers are in the final table."""
        return {}

    def on_evaluate(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs after each validation, with the logged metrics."""

    def on_save(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs after a save has started; `metrics` has the saved step's validation metrics, or is empty."""

    def on_rollback(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs after a rollback to `loop.step`, with the restored state; `metrics` is empty."""

    def on_text(self, loop: "Loop", name: str, text: str) -> None:
        """Receives text that the run outputs, such as samples; `name` identifies the kind of text."""

    def on_end(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Runs after the last step is saved, with the validation metrics of the last step."""

    def close(self) -> None:
        """Runs last, even after an exception."""


class Callbacks:
    """Calls the methods of all of a run's callbacks, in order."""

    def __init__(self, callbacks: Sequence[Callback], goodput: Goodput):
        self.all, self._goodput = tuple(callbacks), goodput

    def overriding(self, method: str) -> list[Callback]:
        """Returns the callbacks whose class overrides `method`."""
        return [callback for callback in self.all if getattr(type(callback), method) is not getattr(Callback, method)]

    def call(self, method: str, *args: object) -> list[tuple]:
        """Calls `method` on all callbacks that override it; returns ("NAME.method", result) of each, in order.

        Raises:
          RunFailed: a callback raised an exception other than UserError, RunFailed or Spike.
        """
        called = self.overriding(method)
        return [(f"{name_of(c)}.{method}", self._call(c, method, self.timed(c), *args)) for c in called]

    def call_untimed(self, method: str, *args: object) -> None:
        """Calls `method` as `call` does, but without adding to the goodput table; for use from other threads."""
        for callback in self.overriding(method):
            self._call(callback, method, contextlib.nullcontext(), *args)

    def timed(self, callback: Callback) -> contextlib.AbstractContextManager:
        """Returns a context manager that adds the elapsed time to the callback's row of the goodput table."""
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
        """Closes all callbacks when the context exits."""
        with contextlib.ExitStack() as stack:
            for callback in self.overriding("close"):
                stack.callback(self._call, callback, "close", contextlib.nullcontext())
            yield self


def name_of(callback: Callback) -> str:
    """Returns a callback's name for messages: its `label`, or its class name if `label` is empty."""
    return callback.label or type(callback).__name__


def describe_error(error: Exception) -> str:
    """Formats an exception as one line: its type and its message."""
    return " ".join(f"{type(error).__name__}: {error}".split())
