"""Reads and formats records: the state of each object of a local copy at its last download or upload."""

import json
from collections.abc import Mapping
from typing import NamedTuple, Optional

from pretrainax.files.errors import UserError
from pretrainax.files.json_files import read_object
from pretrainax.storage.store import Stamp


class LocalState(NamedTuple):
    """Identifies the content of a local file."""

    size: int  # bytes
    mark: int  # modification time in ns; for a part of a growing file, its CRC-32


class ObjectState(NamedTuple):
    """State of an object at its last download or upload, in the store and in the local copy."""

    remote: Stamp  # size and version in the store
    local: Optional[LocalState]  # state of the local file; None: the object was listed, but not downloaded


def read_record(path: str, url: str) -> tuple[dict[str, ObjectState], int]:
    """Reads a record: the state of each object below a URL, and the number of the last lease that this machine held.

    Returns ({}, 0) if the record is missing, damaged or for a different URL. All objects are then downloaded again.
    """
    try:
        record = read_object(path)
        known = {
            name: ObjectState(Stamp(*there), here and LocalState(*here))
            for name, (there, here) in record["objects"].items()
        }
        return (known, int(record["lease"])) if record["url"] == url else ({}, 0)
    except (UserError, KeyError, TypeError, ValueError, AttributeError):
        return {}, 0


def record_text(url: str, lease: int, known: Mapping[str, ObjectState]) -> str:
    """Formats a record as the JSON that `read_record` reads."""
    return json.dumps({"url": url, "lease": lease, "objects": known})
