"""Computes checksums of cache files: they are stored when a file is written and verified when it is read.

Disks, networks and copying sometimes corrupt a byte, and a wrong token id looks like any other token id.
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
    """Returns a new hash object (BLAKE2b, 128 bits) for the content of a file."""
    return hashlib.blake2b(digest_size=16)


def file_checksum(path: str, stop: Optional[threading.Event] = None) -> str:
    """Computes the checksum of a file, at about 1 GB/s, and returns it as a hexadecimal string.

    If the event `stop` is set, reading stops early, and the result is the checksum of the bytes read so far.
    """
    checksum = new_hash()
    with open(path, "rb", buffering=0) as f:
        while (stop is None or not stop.is_set()) and (chunk := f.read(_CHUNK)):
            checksum.update(chunk)
    return checksum.hexdigest()


def write_json(path: str, value: dict[str, object]) -> None:
    """Writes a JSON object together with its checksum to a file, atomically."""
    write_atomically(path, json.dumps(value | {_KEY: digest(value)}))


def read_json(path: str) -> Optional[dict[str, Any]]:
    """Returns the JSON object that `write_json` wrote, or None if the file is missing, truncated or modified.

    Files written by PretrainAX versions that stored no checksums are not verified.

    Raises:
      UserError: the path is a folder, or this user has no permission to read the file.
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
