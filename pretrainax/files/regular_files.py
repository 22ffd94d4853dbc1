"""Reads untrusted files: only regular files, and only up to a size limit.

A file of somebody's model directory may be a link to /dev/zero, or a FIFO that nobody writes to: what opens it would
fill the memory, or wait for ever. A link to a regular file is as good as the file, as in Hugging Face's cache.
"""

import os
import stat

from pretrainax.files.errors import UserError

MOST_BYTES = 1 << 27  # of files that are read at once: descriptions, tokenizers, word lists
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_regular(path: str) -> None:
    """Raises UserError unless a path is a regular file or a link to one; OSError if it does not exist."""
    mode = os.stat(path).st_mode
    for is_kind, name in _KINDS:
        if is_kind(mode):
            raise UserError(f"{path} is {name}, it must be a regular file or a link to one")


def read_bytes(path: str, most: int = MOST_BYTES) -> bytes:
    """Reads a regular file; UserError for other kinds of files, or above `most` bytes."""
    check_regular(path)
    with open(path, "rb") as f:
        content = f.read(most + 1)
    if len(content) > most:
        raise UserError(f"{path} has more than {most:,} bytes, the limit for such files")
    return content
