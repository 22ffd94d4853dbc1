"""Keeps trackers away from the training: each has a thread and a bounded queue of its own.

A call costs a run the time to put it into a queue. A tracker that is stuck fills its queue alone, and what comes then
is dropped and counted; one that fails is said once and gets nothing more.
"""

import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from pretrainax.trackers.base import TrackedRun, Tracker, Writer, one_line
from pretrainax.trackers.secrets import masked

_ROOM = 1000  # calls that may wait: of a run with a line every 50 steps those of 50,000
_CLOSING_SECONDS = 30.0  # for all trackers together
_INSTEAD = "metrics.jsonl has all figures"

Call = Callable[[Writer], None]


class Trackers:
    """Hands what is to be shown of a run to all of its trackers."""

    def __init__(self, trackers: Sequence[Tracker], run: TrackedRun, say: Callable[[str], None]):
        """Opens nothing before there is something to write.

        say: prints a line; it is called by the threads of the trackers.
        """
        self._lanes = [_Lane(tracker, run, say) for tracker in trackers]
        self._step, self._done = run.step, False

    def figures(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Shows the figures after a step; split: "train" or "valid"."""
        self._step = step
        self._put(lambda writer: writer.figures(step, split, values))

    def text(self, name: str, text: str) -> None:
        """Shows a text, in Markdown, at the last step that was shown; what may be secret in it is masked."""
        step, shown = self._step, masked(text)
        self._put(lambda writer: writer.text(step, name, shown))

    def rewind(self, step: int) -> None:
        """Takes back, or marks, what was shown of the steps after `step`."""
        self._step = step
        for lane in self._lanes:
            lane.put(lambda writer: writer.rewind(step), is_needed=True)

    def finish(self, figures: Mapping[str, float]) -> None:
        """Shows the figures of the end, those that are finite, beside the hyperparameters."""
        step, self._done = self._step, True
        finite = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
        self._put(lambda writer: writer.finish(step, finite))

    def close(self) -> None:
        """Waits until all is written, for some seconds at most; says what is not."""
        deadline = time.monotonic() + _CLOSING_SECONDS
        for lane in self._lanes:
            lane.end(self._done)
        for lane in self._lanes:
            lane.wait(deadline)
        self._lanes = []

    def _put(self, call: Call) -> None:
        for lane in self._lanes:
            lane.put(call)


class _Lane:
    """Holds one tracker, the calls that wait for it, and the thread that makes them."""

    def __init__(self, tracker: Tracker, run: TrackedRun, say: Callable[[str], None]):
        self.tracker, self.run, self.name = tracker, run, type(tracker).__name__
        self._say = say
        self._calls: queue.Queue[Call | bool] = queue.Queue(_ROOM)  # a bool ends it: is the run done?
        self._left_out, self._dropped = False, 0

    @functools.cached_property
    def _thread(self) -> threading.Thread:
        # A daemon: the process may end while it hangs.
        thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        thread.start()
        return thread

    def put(self, call: Call, is_needed: bool = False) -> None:
        """Hands a call over; is_needed: what comes later is wrong without it."""
        if self._left_out:
            return
        assert self._thread  # from here on
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            if is_needed:
                self._leave_out("it is stuck, and a rollback does not reach it")
            elif not self._dropped:
                self._say(f"tracker {self.name} is slower than the run: figures are left out there; {_INSTEAD}")
            self._dropped += 1

    def end(self, done: bool) -> None:
        """Asks the thread to close the tracker once it has made all calls."""
        if "_thread" in vars(self) and not self._left_out:
            try:
                self._calls.put_nowait(done)
            except queue.Full:
                self._leave_out(f"it is stuck, {self._calls.qsize():,} entries wait")

    def wait(self, deadline: float) -> None:
        """Waits for the thread until a time; says what is lost where it has not ended."""
        if "_thread" in vars(self) and not self._left_out:
            self._thread.join(max(deadline - time.monotonic(), 0))
            if self._thread.is_alive():
                self._leave_out(f"it did not end within {_CLOSING_SECONDS:g} s")
        if self._dropped:
            self._say(f"tracker {self.name}: {self._dropped:,} entries were left out in all; {_INSTEAD}")

    def _leave_out(self, why: str) -> None:
        self._left_out = True
        self._say(f"tracker {self.name} is left out from here on: {why}; {_INSTEAD}")

    def _work(self) -> None:
        try:
            writer = self.tracker.open(self.run)
            if writer.link:
                self._say(f"{self.name}: {writer.link}")
            while not isinstance(call := self._calls.get(), bool):
                call(writer)
            writer.close(call)
        except Exception as error:
            if not self._left_out:
                self._leave_out(one_line(error))
