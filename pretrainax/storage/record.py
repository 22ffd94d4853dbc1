"""Reads and writes what this machine knows of the objects that it has copies of."""

import json
from collections.abc import Mapping
from typing import NamedTuple, Optional

from pretrainax.files.errors import UserError
from pretrainax.files.json_files import read_object
from pretrainax.storage.store import Stamp


class Here(NamedTuple):
    """Tells one content of a file from another."""

    size: int  # bytes
    mark: int  # when it was written, in nanoseconds; of a part of a file that grows, its CRC-32


class Known(NamedTuple):
    """Says of an object what was last fetched or sent; `here` is None where its file was not fetched."""

    there: Stamp
    here: Optional[Here]


def read_record(path: str, url: str) -> tuple[dict[str, Known], int]:
    """Returns what is known of each object below a URL, and the number of the last lease of this machine.

    Nothing and 0 where there is no record, a damaged one, or one of another URL: everything is then fetched again.
    """
    try:
        record = read_object(path)
        known = {name: Known(Stamp(*there), here and Here(*here)) for name, (there, here) in record["objects"].items()}
        return (known, int(record["lease"])) if record["url"] == url else ({}, 0)
    except (UserError, KeyError, TypeError, ValueError, AttributeError):
        return {}, 0


def record_text(url: str, lease: int, known: Mapping[str, Known]) -> str:
    """Returns the text of a record, as `read_record` reads it."""
    return json.dumps({"url": url, "lease": lease, "objects": known})
