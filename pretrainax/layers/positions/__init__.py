"""Position encodings, one file each.

A new position encoding is a dataclass of fields (`config.positions.Position`), a file here with its behaviour
(`base.Positions`, `base.PositionTerms`), and its name in the import below.
"""

from pretrainax.layers.positions import disentangled, learned, none, relative_buckets, rotary, sinusoidal
from pretrainax.layers.positions.base import (
    AttentionPositions,
    Positions,
    PositionTerms,
    positions_for,
    register_positions,
)

__all__ = [
    "AttentionPositions",
    "PositionTerms",
    "Positions",
    "register_positions",
    "disentangled",
    "learned",
    "none",
    "positions_for",
    "relative_buckets",
    "rotary",
    "sinusoidal",
]
