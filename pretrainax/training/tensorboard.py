"""The curves of a run for TensorBoard."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

_FLUSH_SECONDS = 30


@contextlib.contextmanager
def _no_torch() -> Iterator[None]:
    """Keeps tensorboardX from importing torch, where that is installed: 2 seconds, for tensors that nobody gives it."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]  # to `import` it is not there then
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]


class EventsWriter:
    """Writes a TensorBoard file here and now.

    The thread of tensorboardX's own writer ends at a full disk or a clock that jumps, and a run would wait for it
    forever.
    """

    def __init__(self, folder: str, resume_step: int):
        """Opens a file of its own in `folder`, in which what others there say of steps after `resume_step` is void."""
        with _no_torch():
            from tensorboardX import event_file_writer
            from tensorboardX.proto import event_pb2, summary_pb2

        # Protobuf makes these classes when it is imported, where no type checker sees them.
        self._event, log = event_pb2.Event, event_pb2.SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        self._summary = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        self._next_flush = 0.0
        os.makedirs(folder, exist_ok=True)
        # The name holds the second; the suffix: a rollback within a second of the start has a file of its own.
        self._writer = event_file_writer.EventsWriter(os.path.join(folder, "events"), f".{resume_step}")
        start = log(status=log.START)  # what came after this step is not shown
        self._write(self._event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def add(self, step: int, values: dict[str, float]) -> None:
        """Adds a point at `step` to the curve of each name; raises OSError where the disk is full."""
        summary = self._summary(value=[self._summary.Value(tag=k, simple_value=v) for k, v in values.items()])
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Any) -> None:
        self._writer.write_event(event)
        if time.monotonic() > self._next_flush:  # which waits for the disk
            self._writer.flush()
            self._next_flush = time.monotonic() + _FLUSH_SECONDS

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()
