"""Creates rows of batches from short settings."""

import dataclasses
from typing import Any

from pretrainax.data.row_stream import RowOptions


def row_options(settings: dict[str, Any]) -> tuple[RowOptions, dict[str, Any]]:
    """Splits the settings of `Batches` into the options of its rows and the other settings."""
    names = {field.name for field in dataclasses.fields(RowOptions)} & settings.keys()
    return RowOptions(**{name: settings.pop(name) for name in names}), settings
