"""How a model runs, as apart from what it computes: nothing here changes the parameters or the mathematics."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Compute:
    """The fields of `config.train` that layers read."""

    dtype: str = "float32"  # of activations and matrix products; parameters, norms and softmax are float32
    attention: str = "auto"  # an implementation of layers.attention
    remat: str = "none"  # kept for the backward: none: all | block: block inputs | dots: matrix products
    scan_unroll: int = 1  # blocks unrolled in each turn of the scan over layers
