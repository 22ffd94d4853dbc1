"""JSON files of others: whatever is wrong with one is a UserError that names it."""

import json
from typing import Any, TypeAlias

from pretrainax.config import UserError

JsonObject: TypeAlias = dict[str, Any]  # of values that JSON can hold


def read_object(path: str) -> JsonObject:
    """The object that a file holds; UserError where it is missing, not UTF-8, no JSON, nested too deep, no object."""
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} is no JSON file ({getattr(e, 'strerror', None) or e})") from e
    if not isinstance(value, dict):
        raise UserError(f"{path} is no JSON object")
    return value
