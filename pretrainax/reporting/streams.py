"""Keeps stdout and stderr usable after their reader has gone away: `| head`, a closed terminal, `2>&-`."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_CLOSED_ERRORS = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF)  # errors of a closed pipe, terminal or file


class LastingStream:
    """A text stream that discards its output after its reader has closed it, instead of raising OSError."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text, or discards it if the reader has closed the stream; returns the number of characters."""
        with self._discard_if_closed():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream; if the reader has closed it, discards the buffered text and all later output."""
        with self._discard_if_closed():
            self._stream.flush()

    @contextlib.contextmanager
    def _discard_if_closed(self) -> Iterator[None]:
        """Redirects the stream to os.devnull if an operation in the context fails because the reader has closed it."""
        try:
            yield
        except OSError as e:
            if e.errno not in _CLOSED_ERRORS:
                raise
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, self._stream.fileno())  # for libraries that write to the file descriptor
            os.close(devnull)


def print_progress(line: str) -> None:
    """Prints a line to stderr, because stdout is for results, which may be JSON."""
    print(line, file=sys.stderr, flush=True)


def keep_streams() -> None:
    """Wraps this process's stdout and stderr in a `LastingStream`, and opens standard streams that are closed.

    If a standard stream stayed closed, the next file to be opened, perhaps a checkpoint, would get its file descriptor,
    and libraries that write messages to stderr would write them into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their file descriptors
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
            os.set_inheritable(getattr(sys, name).fileno(), True)
    sys.stdout, sys.stderr = LastingStream(sys.stdout), LastingStream(sys.stderr)
