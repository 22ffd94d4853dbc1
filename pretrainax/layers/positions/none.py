"""No positions: a model reads words in their order, or its causal mask alone tells them apart."""

from pretrainax.config import NoPositions
from pretrainax.layers.positions.base import Positions, behaviour_of


@behaviour_of(NoPositions)
class Nothing(Positions):
    """Does nothing, as its base does."""
