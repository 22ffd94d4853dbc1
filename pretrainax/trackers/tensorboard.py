"""The TensorBoard tracker, which uses only modules of tensorboardX that do not start a thread.

The thread of tensorboardX's `SummaryWriter` dies if the disk is full or the clock jumps, and the process would then
wait for it forever.
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
_FOLDER_NAME = "events"
_SPLITS = ("train", "valid")


class _Message(Protocol):
    """A protobuf message."""

    def SerializeToString(self) -> bytes: ...


@dataclasses.dataclass
class TensorBoard(Tracker):
    """Writes event files to the workdir: `tensorboard --logdir=RUN` displays them.

    Training and validation are two TensorBoard runs, so that a single chart displays both. On resume or rollback, a
    session-start event tells event-file readers to discard existing entries for later steps.
    """

    def open(self, run: TrackedRun) -> "EventWriter":
        return EventWriter(os.path.join(run.workdir, _FOLDER_NAME), run)

    def describe(self, workdir: str) -> str:
        return f"TensorBoard, {with_urls(os.path.join(workdir, _FOLDER_NAME))}"


# Optional packages that tensorboardX imports if they are installed. This tracker does not need them, and their imports
# take 2 s, 0.5 s and 0.3 s.
_UNUSED_PACKAGES = ("torch", "boto3", "google.cloud.storage")


@contextlib.contextmanager
def _without_unused_packages() -> Iterator[None]:
    """Prevents tensorboardX from importing the packages in _UNUSED_PACKAGES within the context."""
    blocked = [name for name in _UNUSED_PACKAGES if name not in sys.modules]
    sys.modules |= dict.fromkeys(blocked)  # pyright: ignore[reportArgumentType]  # None makes `import` fail
    try:
        yield
    finally:
        for name in blocked:
            del sys.modules[name]


class EventWriter(Writer):
    """Writes the event files of a run: events/train, events/valid, Markdown entries and hyperparameters."""

    def __init__(self, folder: str, run: TrackedRun):
        """Opens new event files, which invalidate existing entries for steps after `run.step`."""
        with _without_unused_packages():
            from tensorboardX import summary
        self._summary, self._folder, self._config = summary, folder, run.config
        is_new = not os.path.isdir(folder)
        self._open(run.step)
        if is_new or run.step == 0:
            self.write_text(0, "config", config_table(run.config))

    def _open(self, step: int) -> None:
        """Opens a new event file for each split, which invalidates existing entries after `step`."""
        first_invalid = step + 1 if step else 0  # a run that begins again at step 0 also writes its config again
        self._files = {split: _EventFile(os.path.join(self._folder, split), first_invalid) for split in (*_SPLITS, "")}

    def write_metrics(self, step: int, split: str, values: Mapping[str, float]) -> None:
        scalars = [value for name, x in values.items() for value in self._summary.scalar(name, x).value]
        self._files[split].add(step, scalars)

    def write_text(self, step: int, name: str, text: str) -> None:
        self._files[""].add(step, self._summary.text(name, text).value)

    def rewind(self, step: int) -> None:
        self._close_files()
        self._open(step)

    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the run's final metrics and hyperparameters for TensorBoard's HPARAMS tab."""
        values = {f"final/{name}": value for name, value in metrics.items()}
        summaries = self._summary.hparams(dict[str, Value](self._config), values)
        file = _EventFile(os.path.join(self._folder, "hparams"), 0)
        for summary in summaries:
            file.add(step, summary.value)
        file.add(step, [value for name, x in values.items() for value in self._summary.scalar(name, x).value])
        file.close()

    def close(self, done: bool) -> None:
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()


class _EventFile:
    """An open event file; writing raises OSError if the disk is full."""

    def __init__(self, folder: str, after: int):
        """Creates an event file in a folder; it invalidates entries of older files from step `after` on."""
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
        """Writes the values of a step, which come from a tensorboardX summary."""
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
