"""Position encodings, one file each.

A new position encoding is a dataclass of fields (`config.positions.Position`), a file here with its behaviour
(`base.Positions`, `base.PositionTerms`), and its name in the import below.
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
