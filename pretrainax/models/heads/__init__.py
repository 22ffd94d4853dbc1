"""Heads of models, one file each, with modules, output, loss and metrics.

A new head is a file here with a subclass of `base.Head`, imported below.
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
