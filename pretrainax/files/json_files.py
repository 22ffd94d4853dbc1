"""Reads untrusted JSON files; for an invalid file, raises a UserError that contains the path of the file."""

import json
from typing import Any, TypeAlias

from pretrainax.files.errors import UserError
from pretrainax.files.regular_files import read_bytes

JsonObject: TypeAlias = dict[str, Any]  # the values are JSON values: dicts, lists, strings, numbers, booleans or None


def read_object(path: str) -> JsonObject:
    """Reads a file that contains a single JSON object; returns the object as a dict.

    Raises:
      UserError: the file is missing, not a regular file, too large, not UTF-8, not JSON, nested too deeply, or
        contains a JSON value that is not an object.
    """
    try:
        value = json.loads(read_bytes(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} is not a JSON file ({getattr(e, 'strerror', None) or e})") from e
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value
