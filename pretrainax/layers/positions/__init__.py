"""Position encodings, with one file for each encoding.

To add a position encoding, add a dataclass with its fields (`config.positions.Position`) and a file in this folder with
its computation (subclasses of `base.Positions` and `base.PositionTerms`). Import this file below.
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
