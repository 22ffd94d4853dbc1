"""Compatibility: fields of config.json that had another name or location in an earlier version."""

from collections.abc import Callable

from pretrainax.files.json_files import JsonObject


def _model(fields: JsonObject) -> JsonObject:
    """Moves `recurrent` (0.6) into `parts`."""
    recurrent = fields.pop("recurrent", None)
    return fields if recurrent is None else {**fields, "parts": [*fields.get("parts", ()), recurrent]}


_CHANGES: dict[str, Callable[[JsonObject], JsonObject]] = {"ModelConfig": _model}


def in_current_form(class_name: str, fields: JsonObject) -> JsonObject:
    """Returns the fields of a class under their current names."""
    change = _CHANGES.get(class_name)
    return fields if change is None else change(dict(fields))
