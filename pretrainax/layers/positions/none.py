"""No positions: a model reads words in their order, or its causal mask alone distinguishes positions."""

from pretrainax.config import NoPositions
from pretrainax.layers.positions.base import Positions, register_positions


@register_positions(NoPositions)
class NoPositionEncoding(Positions):
    """A position encoding that does nothing."""
