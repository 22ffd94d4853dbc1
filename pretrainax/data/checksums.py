"""Checksums of cache files: stored when a file is written, compared when it is read.

Disks, networks and copies corrupt a byte now and then, and a wrong token looks like any other token.
"""

import hashlib
import json
import threading
from typing import Any, Optional

from pretrainax.config import UserError
from pretrainax.data.files import digest
from pretrainax.files.atomic_files import write_atomically

_CHUNK = 1 << 22  # bytes read at a time
_KEY = "checksum"  # key of the checksum inside a JSON file


def new_hash() -> "hashlib.blake2b":
    """Returns a new hash object for a file that is being written."""
    return hashlib.blake2b(digest_size=16)


def file_checksum(path: str, stop: Optional[threading.Event] = None) -> str:
    """Returns the checksum of a file (about 1 GB/s); once `stop` is set, of the part read so far."""
    checksum = new_hash()
    with open(path, "rb", buffering=0) as f:
        while (stop is None or not stop.is_set()) and (chunk := f.read(_CHUNK)):
            checksum.update(chunk)
    return checksum.hexdigest()


def write_json(path: str, value: dict[str, Any]) -> None:
    """Writes an object together with its checksum, atomically."""
    write_atomically(path, json.dumps(value | {_KEY: digest(value)}))


def read_json(path: str) -> Optional[dict[str, Any]]:
    """Reads an object that `write_json` wrote; returns None if the file is missing, truncated or changed.

    Caches from versions before checksums have none; their objects are returned unchecked.

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
