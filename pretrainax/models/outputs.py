"""What a model returns."""

from typing import Any

import flax.struct

from pretrainax.layers.sums import Sums


@flax.struct.dataclass
class Outputs:
    """What each head of the model says, and what its blocks give beside the stream."""

    heads: dict[str, Any]  # name of a head -> its output, see models.heads
    sums: Sums = flax.struct.field(default_factory=dict)  # of all blocks; what ends in "_loss" is minimised too
    state: Any = None  # of the decoder's blocks, stacked [L, …]; None for a model that was given none
