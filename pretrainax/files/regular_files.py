"""Reads untrusted files: only regular files, and only up to a size limit.

A file in an untrusted model directory may be a link to /dev/zero, which would exhaust the memory, or a FIFO without
a writer, which would block forever. Links to regular files are allowed, because the Hugging Face cache contains
them.
"""

import os
import stat

from pretrainax.files.errors import UserError

MAX_BYTES = 1 << 27  # maximum size of a file that is read into memory: a config, a tokenizer, a word list
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_regular(path: str) -> None:
    """Raises UserError if `path` is neither a regular file nor a link to one, and OSError if it does not exist."""
    mode = os.stat(path).st_mode
    for is_kind, name in _KINDS:
        if is_kind(mode):
            raise UserError(f"{path} is {name}, it must be a regular file or a link to one")


def read_bytes(path: str, most: int = MAX_BYTES) -> bytes:
    """Reads a regular file of at most `most` bytes; returns its content.

    Raises:
      UserError: `path` is not a regular file, or the file has more than `most` bytes.
      OSError: the file does not exist or cannot be read.
    """
    check_regular(path)
    with open(path, "rb") as f:
        content = f.read(most + 1)
    if len(content) > most:
        raise UserError(f"{path} has more than {most:,} bytes, the limit for such files")
    return content
