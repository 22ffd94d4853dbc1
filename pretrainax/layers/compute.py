"""Says how a model runs, as apart from what it computes: nothing here changes the parameters or the mathematics."""

import dataclasses
from typing import Optional

from pretrainax.config import TrainConfig
from pretrainax.sharding.mesh import GPUS, platform


@dataclasses.dataclass(frozen=True)
class Compute:
    """The fields of `config.train` that layers read."""

    dtype: str = "float32"  # of activations and matrix products; parameters, norms and softmax are float32
    attention: str = "auto"  # an implementation of layers.attention
    # residuals of a block saved for the backward: none: what layers.made_again says, on a CPU all | block: its inputs |
    # dots: products of linear maps
    remat: str = "none"
    pipeline_parts: int = 0  # micro-batches of a pipeline; 0: one of each row
    scan_unroll: int = 1  # blocks unrolled in each turn of the scan over layers; 0: what suits the devices


# On a GPU a loop over layers copies what each keeps for its backward into stacks and out again, a fifth of the traffic;
# without one, more layers than these take its compiler long. A TPU's loops cost little, and 12 layers without one take
# its compiler minutes. benchmarks/README.md has the figures.
_MOST_UNROLLED = 24
_CPU_UNROLLED = 4


def for_this_machine(train: TrainConfig) -> TrainConfig:
    """Returns `train` with each "auto" and 0 replaced by what suits the devices of `jax.set_mesh`.

    But that of `scan_unroll`, for which the blocks must be known: `blocks_in_a_turn`.
    """
    on_cpu = platform() == "cpu"
    return dataclasses.replace(
        train,
        dtype=("float32" if on_cpu else "bfloat16") if train.dtype == "auto" else train.dtype,
        remat="none" if train.remat == "auto" else train.remat,  # where no plan was asked before
        loss_chunk=train.loss_chunk or (1024 if on_cpu else 4096),
    )


def compute_for(train: TrainConfig) -> Compute:
    """Returns the fields that layers read, of what `for_this_machine` returned."""
    return Compute(**{f.name: getattr(train, f.name) for f in dataclasses.fields(Compute)})


def blocks_in_a_turn(compute: Compute, num_layers: int, on: Optional[str] = None) -> int:
    """Returns how many blocks each turn of the scan over layers has; on: a platform, None: that of `jax.set_mesh`."""
    on = on or platform()
    if compute.scan_unroll:
        return min(compute.scan_unroll, num_layers)
    if on == "cpu":
        return min(_CPU_UNROLLED, num_layers)
    return num_layers if on in GPUS and num_layers <= _MOST_UNROLLED else 1
