"""Rows of batches, made with few words."""

import dataclasses
from typing import Any

from pretrainax.data.row_stream import RowOptions


def row_options(settings: dict[str, Any]) -> tuple[RowOptions, dict[str, Any]]:
    """Returns what of the settings of `Batches` is an option of its rows, and the others."""
    names = {field.name for field in dataclasses.fields(RowOptions)} & settings.keys()
    return RowOptions(**{name: settings.pop(name) for name in names}), settings
