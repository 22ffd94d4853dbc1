"""Checksums of the files of a cache: kept when they are written, compared when they are read.

Disks, networks and copies change a byte now and then. A token that is another one looks like any other.
"""

import hashlib
import json
import threading
from typing import Any, Optional

from pretrainax.config import UserError
from pretrainax.data.files import digest
from pretrainax.files.atomic_files import write_atomically

_CHUNK = 1 << 22  # bytes read at a time
_KEY = "checksum"  # of a JSON file, in it


def new() -> "hashlib.blake2b":
    """Returns what adds up the checksum of a file that is being written."""
    return hashlib.blake2b(digest_size=16)


def of_file(path: str, stop: Optional[threading.Event] = None) -> str:
    """Returns the checksum of a file (about 1 GB/s); of a part of it once `stop` is set."""
    checksum = new()
    with open(path, "rb", buffering=0) as f:
        while (stop is None or not stop.is_set()) and (chunk := f.read(_CHUNK)):
            checksum.update(chunk)
    return checksum.hexdigest()


def write_json(path: str, value: dict[str, Any]) -> None:
    """Writes an object with a checksum of itself, at once or not at all."""
    write_atomically(path, json.dumps(value | {_KEY: digest(value)}))


def read_json(path: str) -> Optional[dict[str, Any]]:
    """Reads what `write_json` wrote; None where it is missing, cut short or changed.

    An object without a checksum is of a cache that was made before there were any, and is read as it is.

    Raises:
      UserError: the path is a folder, or this user may not read the file.
    """
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    except OSError as e:
        raise UserError(f"{path} is damaged ({e.strerror}): delete it and prepare again") from e
    if not isinstance(value, dict):
        return None
    checksum = value.pop(_KEY, None)
    return value if checksum in (None, digest(value)) else None
