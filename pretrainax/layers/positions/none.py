"""No positions: a model reads words in their order, or its causal mask alone distinguishes positions."""

from pretrainax.config import NoPositions
from pretrainax.layers.positions.base import Positions, behaviour_of


@behaviour_of(NoPositions)
class Nothing(Positions):
    """A position encoding that does nothing."""
