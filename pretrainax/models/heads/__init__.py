"""Heads of models. Each file defines a head: its Flax modules, output, loss and metrics.

To add a head, add a file with a registered subclass of `base.Head`, and import the file below.
"""

from pretrainax.models.heads import (
    backward_language_model,
    classify,
    embed,
    extract,
    language_model,
    multi_token,
    pairs,
    replaced_tokens,
    tag,
)
from pretrainax.models.heads.base import HEADS, Head, heads_of, register_head

__all__ = [
    "HEADS",
    "Head",
    "backward_language_model",
    "classify",
    "embed",
    "extract",
    "heads_of",
    "language_model",
    "multi_token",
    "pairs",
    "register_head",
    "replaced_tokens",
    "tag",
]
