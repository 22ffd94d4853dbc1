"""Keeps stdout and stderr usable after their reader is gone: `| head`, a closed terminal, `2>&-`."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF)  # errors of a pipe, a closed terminal, a closed file


class LastingStream:
    """A text stream that drops output if its reader is gone, instead of raising OSError."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text and returns its number of characters."""
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        with self._dropping():
            self._stream.flush()

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            if e.errno not in _GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # also for libraries that write to the file descriptor
            os.close(nowhere)


def keep_streams() -> None:
    """Wraps stdout and stderr of this process in a `LastingStream`, and opens standard streams that are closed.

    Otherwise the next file that is opened, perhaps of a checkpoint, would get the file descriptor of a closed stream,
    and libraries would write their stderr messages into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their file descriptors
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
            os.set_inheritable(getattr(sys, name).fileno(), True)
    sys.stdout, sys.stderr = LastingStream(sys.stdout), LastingStream(sys.stderr)
