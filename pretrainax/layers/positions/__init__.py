"""Positions, by which a model knows where a token stands: one file for each kind of positions.

A new kind is a dataclass of fields (`config.positions.Position`), a file here with what it does (`base.Positions`,
`base.PositionTerms`), and its name in the line below.
"""

from pretrainax.layers.positions import disentangled, learned, none, relative_buckets, rotary, sinusoidal
from pretrainax.layers.positions.base import Places, Positions, PositionTerms, behaviour_of, positions_of

__all__ = [
    "Places",
    "PositionTerms",
    "Positions",
    "behaviour_of",
    "disentangled",
    "learned",
    "none",
    "positions_of",
    "relative_buckets",
    "rotary",
    "sinusoidal",
]
