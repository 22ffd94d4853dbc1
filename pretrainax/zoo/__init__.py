"""Published architectures: one module per family of models.

Each module defines the sizes of the published models, and a name table for each architecture that Hugging Face
transformers also has. The name table maps each of this package's parameters to tensors in transformers' files.

Examples of presets: zoo.preset("bert_base"), zoo.preset("t5_v1_0_small"), zoo.preset("llama3_8b")
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrainax.zoo.presets import FAMILIES, PRESETS, Family, preset, sources_path

__all__ = ["FAMILIES", "PRESETS", "Family", "preset", "sources_path"]


def __getattr__(name: str) -> object:
    """Imports all families on first use; they import JAX, and `pretrainax zoo --help` must not wait for this import."""
    if name in __all__:
        return getattr(importlib.import_module("pretrainax.zoo.presets"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
