"""The outputs of a model."""

import flax.struct

from pretrainax.layers.sums import Sums
from pretrainax.sharding.param_paths import PyTree


@flax.struct.dataclass
class Outputs:
    """Holds what each head of the model says, and what its blocks give beside the stream."""

    heads: dict[str, PyTree]  # name of a head -> its output, see models.heads
    sums: Sums = flax.struct.field(default_factory=dict)  # of all blocks; what ends in "_loss" is minimised too
    state: PyTree = None  # of the decoder's blocks, stacked [L, …]; None for a model that was given none
