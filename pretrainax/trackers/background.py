"""Runs each tracker in its own thread with a bounded queue, so that a tracker cannot delay training.

The training thread only enqueues calls. If a tracker is stuck and its queue fills up, additional calls are dropped and
counted. If a tracker fails, the error is logged once and the tracker is disabled.
"""

import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from pretrainax.trackers.base import TrackedRun, Tracker, Writer, describe_error
from pretrainax.trackers.secrets import masked

_MAX_QUEUED = 1000  # maximum number of queued calls: 50,000 steps with a log line every 50 steps
_CLOSING_SECONDS = 30.0  # time limit for closing all trackers together
_COMPLETE = "metrics.jsonl is complete"

Call = Callable[[Writer], None]


class Trackers:
    """Sends the metrics and Markdown entries of a run to all of its trackers."""

    def __init__(self, trackers: Sequence[Tracker], run: TrackedRun, log: Callable[[str], None]):
        """Stores the trackers; each one is opened in its own thread on its first call.

        Args:
          log: function that prints a line. It is called from the tracker threads.
        """
        self._workers = [_Worker(tracker, run, log) for tracker in trackers]
        self._step, self._done = run.step, False

    def log_metrics(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Sends the metrics of `step`, computed on the split "train" or "valid", to all trackers."""
        self._step = step
        self._put(lambda writer: writer.write_metrics(step, split, values))

    def log_text(self, name: str, text: str) -> None:
        """Sends a Markdown text to all trackers, with secrets masked, as the entry `name` of the latest step."""
        step, safe = self._step, masked(text)
        self._put(lambda writer: writer.write_text(step, name, safe))

    def rewind(self, step: int) -> None:
        """Makes all trackers remove or mark their entries after `step`, because the run rolls back to this step."""
        self._step = step
        for worker in self._workers:
            worker.put(lambda writer: writer.rewind(step), is_needed=True)

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of the last validation to all trackers as final results; omits NaN and inf."""
        step, self._done = self._step, True
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._put(lambda writer: writer.finish(step, finite))

    def close(self) -> None:
        """Waits up to 30 s for the queues to drain, and logs how many entries were not written."""
        deadline = time.monotonic() + _CLOSING_SECONDS
        for worker in self._workers:
            worker.end(self._done)
        for worker in self._workers:
            worker.wait(deadline)
        self._workers = []

    def _put(self, call: Call) -> None:
        for worker in self._workers:
            worker.put(call)


class _Worker:
    """Sends calls to a single tracker, through a queue, in a separate thread."""

    def __init__(self, tracker: Tracker, run: TrackedRun, log: Callable[[str], None]):
        self.tracker, self.run, self.name = tracker, run, type(tracker).__name__
        self._log = log
        self._calls: queue.Queue[Call | bool] = queue.Queue(
            _MAX_QUEUED
        )  # a bool closes the tracker: True if the run has completed
        self._disabled, self._dropped = False, 0

    @functools.cached_property
    def _thread(self) -> threading.Thread:
        # A daemon thread, so that a hanging tracker does not keep the process alive.
        thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        thread.start()
        return thread

    def put(self, call: Call, is_needed: bool = False) -> None:
        """Enqueues a call, or drops it if the queue is full.

        Args:
          is_needed: whether later entries would be wrong without this call, so that the tracker must be disabled if the
            queue is full.
        """
        if self._disabled:
            return
        assert self._thread  # the property starts the thread
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            if is_needed:
                self._disable("it is stuck and missed a rollback")
            elif not self._dropped:
                self._log(f"tracker {self.name} is slower than the run and drops entries; {_COMPLETE}")
            self._dropped += 1

    def end(self, done: bool) -> None:
        """Enqueues a request to close the tracker; `done` tells it whether the run has completed."""
        if "_thread" in vars(self) and not self._disabled:
            try:
                self._calls.put_nowait(done)
            except queue.Full:
                self._disable(f"it is stuck with {self._calls.qsize():,} queued entries")

    def wait(self, deadline: float) -> None:
        """Waits for the thread until `deadline` (a time.monotonic value), and logs the number of lost entries."""
        if "_thread" in vars(self) and not self._disabled:
            self._thread.join(max(deadline - time.monotonic(), 0))
            if self._thread.is_alive():
                self._disable(f"it did not finish within {_CLOSING_SECONDS:g} s")
        if self._dropped:
            self._log(f"tracker {self.name} dropped {self._dropped:,} entries; {_COMPLETE}")

    def _disable(self, reason: str) -> None:
        self._disabled = True
        self._log(f"tracker {self.name} is disabled: {reason}; {_COMPLETE}")

    def _work(self) -> None:
        """Opens the tracker, executes the queued calls and closes the tracker; disables it if an exception occurs."""
        try:
            writer = self.tracker.open(self.run)
            if writer.link:
                self._log(f"{self.name}: {writer.link}")
            while not isinstance(call := self._calls.get(), bool):
                call(writer)
            writer.close(call)
        except Exception as error:
            if not self._disabled:
                self._disable(describe_error(error))
