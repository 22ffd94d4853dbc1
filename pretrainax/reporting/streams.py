"""Keeps stdout and stderr usable after their reader is gone: `| head`, a closed terminal, `2>&-`."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF)  # errors of a pipe, a closed terminal, a closed file


class LastingStream:
    """A text stream that discards its output if its reader is gone, instead of raising OSError."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text and returns the number of its characters; discards the text if the reader is gone."""
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream; if the reader is gone, discards the text and all later output."""
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
            os.dup2(nowhere, self._stream.fileno())  # for libraries that write to the file descriptor
            os.close(nowhere)


def keep_streams() -> None:
    """Wraps stdout and stderr of this process in a `LastingStream`, and opens standard streams that are closed.

    If a standard stream stayed closed, the next file that is opened, perhaps a file of a checkpoint, would get its file
    descriptor, and libraries would write messages for stderr into this file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their file descriptors
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
            os.set_inheritable(getattr(sys, name).fileno(), True)
    sys.stdout, sys.stderr = LastingStream(sys.stdout), LastingStream(sys.stderr)
