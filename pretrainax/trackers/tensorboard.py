"""The TensorBoard tracker, which uses only the parts of tensorboardX that start no thread.

The thread of tensorboardX's `SummaryWriter` dies if the disk is full or the clock jumps. The process would then wait
for this thread forever.
"""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from pretrainax.storage.places import with_urls
from pretrainax.trackers.base import TrackedRun, Tracker, Value, Writer, config_table

_FLUSH_SECONDS = 30
_FOLDER = "events"
_SPLITS = ("train", "valid")


class _Message(Protocol):
    """A protobuf message."""

    def SerializeToString(self) -> bytes: ...


@dataclasses.dataclass
class TensorBoard(Tracker):
    """Writes event files to the workdir: `tensorboard --logdir=RUN` shows them.

    Training and validation are two TensorBoard runs, so that one chart shows both. At a resume or a rollback, a
    session-start event tells readers of event files to ignore the earlier entries of later steps.
    """

    def open(self, run: TrackedRun) -> "EventWriter":
        return EventWriter(os.path.join(run.workdir, _FOLDER), run)

    def describe(self, workdir: str) -> str:
        return f"TensorBoard, {with_urls(os.path.join(workdir, _FOLDER))}"


# Packages that tensorboardX imports if they are installed, and that are not needed here; importing them takes 2 s,
# 0.5 s and 0.3 s.
_UNUSED = ("torch", "boto3", "google.cloud.storage")


@contextlib.contextmanager
def _without_unused() -> Iterator[None]:
    """Prevents tensorboardX, inside the context, from importing packages that are not needed here."""
    hidden = [name for name in _UNUSED if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # pyright: ignore[reportArgumentType]  # None makes `import` fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


class EventWriter(Writer):
    """Writes the event files of a run: events/train, events/valid, texts and hyperparameters."""

    def __init__(self, folder: str, run: TrackedRun):
        """Opens new files, which invalidate existing entries of steps after `run.step`."""
        with _without_unused():
            from tensorboardX import summary
        self._summary, self._folder, self._config = summary, folder, run.config
        is_new = not os.path.isdir(folder)
        self._open(run.step)
        if is_new or run.step == 0:
            self.write_text(0, "config", config_table(run.config))

    def _open(self, step: int) -> None:
        after = step + 1 if step else 0  # a run that begins again at step 0 also writes its config again
        self._files = {split: _EventFile(os.path.join(self._folder, split), after) for split in (*_SPLITS, "")}

    def write_metrics(self, step: int, split: str, values: Mapping[str, float]) -> None:
        found = [value for name, x in values.items() for value in self._summary.scalar(name, x).value]
        self._files[split].add(step, found)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._files[""].add(step, self._summary.text(name, text).value)

    def rewind(self, step: int) -> None:
        self._close_files()
        self._open(step)

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics and hyperparameters of the run for the HPARAMS tab of TensorBoard."""
        values = {f"final/{name}": value for name, value in metrics.items()}
        parts = self._summary.hparams(dict[str, Value](self._config), values)
        file = _EventFile(os.path.join(self._folder, "hparams"), 0)
        for part in parts:
            file.add(step, part.value)
        file.add(step, [value for name, x in values.items() for value in self._summary.scalar(name, x).value])
        file.close()

    def close(self, done: bool) -> None:
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()


class _EventFile:
    """One event file; writing raises OSError if the disk is full."""

    def __init__(self, folder: str, after: int):
        """Opens a new file in a folder, which invalidates the entries of step `after` and later in the other files."""
        from tensorboardX import RecordWriter
        from tensorboardX.proto import event_pb2

        # Protobuf creates these classes at import; type checkers do not see them.
        self._event, log = event_pb2.Event, event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        self._next_flush = 0.0
        os.makedirs(folder, exist_ok=True)
        # The name contains microseconds: readers sort files by name, and a rollback may happen within the same second.
        self._records = RecordWriter(os.path.join(folder, f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"))
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        self._write(self._event(wall_time=time.time(), step=after, session_log=log(status=log.START)))

    def add(self, step: int, values: Iterable[_Message]) -> None:
        """Adds values for a step; values: from a summary of tensorboardX."""
        event = self._event(wall_time=time.time(), step=step)
        event.summary.value.extend(values)
        self._write(event)

    def _write(self, event: _Message) -> None:
        self._records.write(event.SerializeToString())
        if time.monotonic() > self._next_flush:  # not after each event, because flushing waits for the disk
            self._records.flush()
            self._next_flush = time.monotonic() + _FLUSH_SECONDS

    def close(self) -> None:
        self._records.flush()
        self._records.close()
