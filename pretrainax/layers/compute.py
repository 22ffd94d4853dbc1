"""Settings of how a model runs; they change neither its parameters nor its mathematics."""

import dataclasses
from typing import Optional

from pretrainax.config import TrainConfig
from pretrainax.sharding.mesh import GPUS, platform


@dataclasses.dataclass(frozen=True)
class Compute:
    """The fields of `config.train` that layers read."""

    dtype: str = "float32"  # of activations and matrix products; parameters, norms and softmax are float32
    attention: str = "auto"  # backend of layers.attention
    # Residuals of a block that are saved for the backward. none: the policy of layers.rematerialization, on a CPU all.
    # block: the inputs of the block. dots: products of linear maps.
    remat: str = "none"
    pipeline_microbatches: int = 0  # microbatches of a pipeline; 0: one per row
    scan_unroll: int = 1  # blocks in each iteration of the scan over layers; 0: chosen for the devices


# On a GPU, a loop over layers copies the residuals of each layer into stacks and back, a fifth of the traffic.
# Unrolling more layers than this takes long to compile. On a TPU, loops cost little, and unrolling 12 layers takes
# minutes to compile. benchmarks/lab_book.md has the measurements.
_MOST_UNROLLED = 24
_CPU_UNROLLED = 4


def resolve_auto(train: TrainConfig) -> TrainConfig:
    """Returns `train` with each "auto" and 0 replaced by a value for the devices of `jax.set_mesh`.

    `scan_unroll` stays as it is, because its value depends on the blocks: see `blocks_per_iteration`.
    """
    on_cpu = platform() == "cpu"
    return dataclasses.replace(
        train,
        dtype=("float32" if on_cpu else "bfloat16") if train.dtype == "auto" else train.dtype,
        remat="none" if train.remat == "auto" else train.remat,  # no memory plan has chosen a policy
        loss_chunk=train.loss_chunk or (1024 if on_cpu else 4096),
    )


def compute_for(train: TrainConfig) -> Compute:
    """Returns the fields of a training config that layers read; `resolve_auto` must have replaced its `auto` values."""
    return Compute(**{f.name: getattr(train, f.name) for f in dataclasses.fields(Compute)})


def blocks_per_iteration(compute: Compute, num_layers: int, on: Optional[str] = None) -> int:
    """Returns the number of blocks in each iteration of the scan over layers.

    Args:
      on: a platform; None: the platform of `jax.set_mesh`.
    """
    on = on or platform()
    if compute.scan_unroll:
        return min(compute.scan_unroll, num_layers)
    if on == "cpu":
        return min(_CPU_UNROLLED, num_layers)
    return num_layers if on in GPUS and num_layers <= _MOST_UNROLLED else 1
