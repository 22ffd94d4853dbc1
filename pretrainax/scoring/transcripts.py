"""Writes transcripts: one JSON object per scored document, span, record or example, from which results are computed."""

import json
import os
from collections.abc import Callable, Iterable

import numpy as np

from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject

Record = Callable[[JsonObject], None]  # stores one transcript


def discard(transcript: JsonObject) -> None:
    """Ignores a transcript; the default of the functions that record transcripts."""


def write_transcripts(path: str, transcripts: Iterable[JsonObject]) -> str:
    """Writes transcripts to a JSON Lines file; returns a message with the number of lines and the path."""
    lines = [json.dumps(transcript, ensure_ascii=False, default=_plain) for transcript in transcripts]
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    return f"{len(lines):,} transcripts in {path}"


def _plain(value: object) -> object:
    """Converts NumPy arrays and scalars, which `json` does not support, to Python values."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
