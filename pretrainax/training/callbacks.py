"""Callbacks: code that is called beside the steps of a run, of this package and of users.

    @dataclasses.dataclass
    class Histogram(Callback):
        every: int = 100

        def on_step(self, loop, state, metrics):
            if loop.step % self.every == 0:
                loop.note(str(jax.tree.map(jnp.std, state.params)))

A callback of a config (`config.callbacks`) is a `Choice`, found by its entry point as others are. All processes of a
run call all methods, so that a method may compute on sharded arrays; what it asks of the loop must be the same in each.
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

if TYPE_CHECKING:  # which imports this module
    from pretrainax.training.loop import Loop
    from pretrainax.training.run import Run


class Callback(kinds.Callback):
    """Base of callbacks: a subclass overrides what it needs.

    An exception ends the run with one line, but after its end, where the run is saved and goes without. The time of
    each is a part of the goodput table.
    """

    part: ClassVar[Optional[str]] = None  # of the goodput table; None: its own; "": that of the step
    label: ClassVar[str] = ""  # in messages; "": the name of its class

    def settle(self, experiment: Experiment) -> None:
        """Sets fields that follow from the devices, which are there, before the data is prepared."""

    def rows(self, run: "Run") -> Iterable[Row]:
        """Returns rows for the header of the run."""
        return ()

    def on_batch(self, step: int, batch: HostBatch) -> None:
        """Is given this process's rows of the batch of a step, in the thread of the loader, as soon as it is made."""

    def on_start(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Is called before the first step of a start, with no metrics."""

    def before_step(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Is called before `loop.step + 1`, with no metrics."""

    def on_step(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Is called after each update. The metrics are still on the device: to read them is to wait for it."""

    def figures(self, loop: "Loop", state: TrainState) -> Mapping[str, object]:
        """Returns what a line of metrics.jsonl has besides, made of `loop.sums`: numbers, or dicts of lists."""
        return {}

    def on_log(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Is called after a line of training metrics."""

    def evaluation(self, loop: "Loop", state: TrainState) -> Mapping[str, float]:
        """Returns metrics of a validation besides those of the objective."""
        return {}

    def on_evaluate(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Is called after a validation."""

    def on_save(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Is called after a checkpoint was handed over, with the metrics of its validation, if there was one."""

    def on_rollback(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Is called when the run has gone back to `loop.step`, whose state it is given, with no metrics."""

    def on_text(self, loop: "Loop", name: str, text: str) -> None:
        """Is given a text about the model, as its samples."""

    def on_end(self, loop: "Loop", state: TrainState, metrics: Mapping[str, PyTree]) -> None:
        """Is called when all steps are made and saved, with the last validation."""

    def close(self) -> None:
        """Is called last, whatever happened."""


class Callbacks:
    """Calls all callbacks of a run, one after the other."""

    def __init__(self, callbacks: Sequence[Callback], goodput: Goodput):
        self.all, self._goodput = tuple(callbacks), goodput

    def having(self, method: str) -> list[Callback]:
        """Returns the callbacks that override a method."""
        return [each for each in self.all if getattr(type(each), method) is not getattr(Callback, method)]

    def call(self, method: str, *args: object) -> list:
        """Calls a method of all that have it, and returns their answers.

        Raises:
          RunFailed: one of them raised an exception.
        """
        return [self._call(each, method, self.timed(each), *args) for each in self.having(method)]

    def call_beside(self, method: str, *args: object) -> None:
        """Does the same in another thread, whose time is no part of the run's."""
        for each in self.having(method):
            self._call(each, method, contextlib.nullcontext(), *args)

    def timed(self, callback: Callback) -> contextlib.AbstractContextManager:
        """Counts the time inside as that of a callback."""
        part = f"callback {name_of(callback)}" if callback.part is None else callback.part
        return self._goodput.on(part) if part else contextlib.nullcontext()

    @staticmethod
    def _call(callback: Callback, method: str, around: contextlib.AbstractContextManager, *args: object):
        with around:
            try:
                return getattr(callback, method)(*args)
            except (UserError, RunFailed, Spike):
                raise
            except Exception as error:
                raise RunFailed(f"callback {name_of(callback)}.{method} failed: {one_line(error)}") from error

    @contextlib.contextmanager
    def closing(self) -> Iterator["Callbacks"]:
        """Closes all of them in the end."""
        with contextlib.ExitStack() as stack:
            for each in self.having("close"):
                stack.callback(each.close)
            yield self


def name_of(callback: Callback) -> str:
    """Returns the name of a callback in messages."""
    return callback.label or type(callback).__name__


def one_line(error: Exception) -> str:
    """Returns an exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
