"""Keeps stdout and stderr usable when nobody reads them any more: `| head`, a terminal that was closed, `2>&-`."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF)  # of a pipe, of a terminal that hung up, of a closed file


class LastingStream:
    """A text stream that drops what is written when its reader is gone, where another one raises OSError."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes as other streams do; returns the number of characters."""
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes as other streams do."""
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
            os.dup2(nowhere, self._stream.fileno())  # for libraries that write to its number, too
            os.close(nowhere)


def keep_streams() -> None:
    """Makes stdout and stderr of this process last, and opens those that it was started without.

    The first file to be opened, which may be a checkpoint's, would take the number of a closed one, and whatever a
    library says on stderr would be written into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their numbers
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
            os.set_inheritable(getattr(sys, name).fileno(), True)
    sys.stdout, sys.stderr = LastingStream(sys.stdout), LastingStream(sys.stderr)
