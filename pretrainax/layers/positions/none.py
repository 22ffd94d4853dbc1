"""No position encoding: a recurrent model reads tokens in order, and a causal mask alone distinguishes positions."""

from pretrainax.config import NoPositions
from pretrainax.layers.positions.base import Positions, register_positions


@register_positions(NoPositions)
class NoPositionEncoding(Positions):
    """A position encoding that changes nothing."""
