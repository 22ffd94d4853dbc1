"""Says how a model runs, as apart from what it computes: nothing here changes the parameters or the mathematics."""

import dataclasses

from pretrainax.config import TrainConfig
from pretrainax.sharding.mesh import platform


@dataclasses.dataclass(frozen=True)
class Compute:
    """The fields of `config.train` that layers read."""

    dtype: str = "float32"  # of activations and matrix products; parameters, norms and softmax are float32
    attention: str = "auto"  # an implementation of layers.attention
    # residuals of a block saved for the backward: none: what layers.made_again says, on a CPU all | block: its inputs |
    # dots: products of linear maps
    remat: str = "none"
    scan_unroll: int = 1  # blocks unrolled in each turn of the scan over layers


def for_this_machine(train: TrainConfig) -> TrainConfig:
    """Returns `train` with each "auto" and 0 replaced by what suits the devices of `jax.set_mesh`."""
    on_cpu = platform() == "cpu"
    return dataclasses.replace(
        train,
        dtype=("float32" if on_cpu else "bfloat16") if train.dtype == "auto" else train.dtype,
        scan_unroll=train.scan_unroll or (4 if on_cpu else 1),
        loss_chunk=train.loss_chunk or (1024 if on_cpu else 4096),
    )


def compute_for(train: TrainConfig) -> Compute:
    """Returns the fields that layers read, of what `for_this_machine` returned."""
    return Compute(**{f.name: getattr(train, f.name) for f in dataclasses.fields(Compute)})
