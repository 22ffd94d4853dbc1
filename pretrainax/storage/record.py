"""Reads and formats a local copy's record, which stores each object's state at its last download or upload."""

import json
from collections.abc import Mapping
from typing import NamedTuple, Optional

from pretrainax.files.errors import UserError
from pretrainax.files.json_files import read_object
from pretrainax.storage.store import Stamp


class LocalState(NamedTuple):
    """Size and change marker of a local file, which together identify its content."""

    size: int  # bytes
    mark: int  # modification time in ns; for a part of a growing file, its CRC-32


class ObjectState(NamedTuple):
    """An object's state, in the store and in the local copy, at its last download or upload."""

    remote: Stamp  # size and version in the store
    local: Optional[LocalState]  # state of the local file; None: the object is listed, but not downloaded


def read_record(path: str, url: str) -> tuple[dict[str, ObjectState], int]:
    """Reads a record; returns {object name: state} and the number of the last lease held by this machine (or 0).

    Returns ({}, 0) if the record is missing, damaged or for a URL other than `url`, so that all objects are downloaded
    again.
    """
    try:
        record = read_object(path)
        states = {
            name: ObjectState(Stamp(*remote), local and LocalState(*local))
            for name, (remote, local) in record["objects"].items()
        }
        return (states, int(record["lease"])) if record["url"] == url else ({}, 0)
    except (UserError, KeyError, TypeError, ValueError, AttributeError):
        return {}, 0


def record_text(url: str, lease: int, known: Mapping[str, ObjectState]) -> str:
    """Formats a record as the JSON text that `read_record` reads."""
    return json.dumps({"url": url, "lease": lease, "objects": known})
