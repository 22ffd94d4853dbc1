"""Settings for how a model is computed, which change neither its parameters nor its mathematics."""

import dataclasses
from typing import Optional

from pretrainax.config import TrainConfig
from pretrainax.sharding.mesh import GPUS, platform


@dataclasses.dataclass(frozen=True)
class Compute:
    """The fields of `config.train` that layers read, as copied by `compute_for`."""

    dtype: str = "float32"  # dtype of activations and matmuls; parameters, norms and softmax are float32
    products: str = ""  # format of the operands of linear layers and experts: a key of eight_bit.FORMATS; "": dtype
    attention: str = "auto"  # name of a backend of layers.attention, or "auto"
    # The residuals of a block to save for the backward. "none": those that `products_saveable` of
    # layers.rematerialization selects; on a CPU, all residuals. "block": only the inputs of the block. "dots": outputs
    # of linear layers.
    remat: str = "none"
    pipeline_microbatches: int = 0  # number of microbatches of a pipeline; 0: one per row of the batch
    scan_unroll: int = 1  # blocks per iteration of the scan over layers; 0: depends on the devices


# On a GPU, a loop over layers copies the residuals of each layer into stacked arrays and back, which is a fifth of the
# memory traffic. Unrolling more than _MAX_UNROLLED layers takes long to compile. On a TPU, loops cost little, and
# unrolling 12 layers takes minutes to compile. benchmarks/lab_book.md has the measurements.
_MAX_UNROLLED = 24
_CPU_UNROLLED = 4  # blocks per iteration on a CPU


_LOGIT_BYTES = 2**31  # of a chunk of bfloat16 logits on a GPU


def resolve_auto(train: TrainConfig, vocab_size: Optional[int] = None) -> TrainConfig:
    """Replaces "auto" and 0 in `train` with values that suit the devices of the current mesh (`jax.set_mesh`).

    The resolved fields are `dtype`, `remat` and `loss_chunk`. `scan_unroll` stays unchanged, because
    `blocks_per_iteration` replaces a 0 separately for each stack, depending on the stack's number of layers.
    `attention` stays unchanged, because each attention layer chooses its backend.

    Args:
      vocab_size: on a GPU, a chunk of the loss has 8,192 tokens if their logits take at most 2 GiB, because each chunk
        reads and writes the gradient of the output matrix. If None or larger, it has 4,096 tokens.
    """
    on_cpu = platform() == "cpu"
    has_room = platform() in GPUS and vocab_size is not None and 2 * 8192 * vocab_size <= _LOGIT_BYTES
    return dataclasses.replace(
        train,
        dtype=("float32" if on_cpu else "bfloat16") if train.dtype == "auto" else train.dtype,
        # "auto" remains here only if no memory plan has chosen a policy.
        remat="none" if train.remat == "auto" else train.remat,
        loss_chunk=train.loss_chunk or (1024 if on_cpu else 8192 if has_room else 4096),
    )


def compiler_options(train: TrainConfig) -> Optional[dict[str, bool | int]]:
    """Returns the options with which XLA compiles the train step on a GPU, or None elsewhere and for 8-bit operands.

    Matmuls use cuBLASLt, which adds a bias and the residual stream inside the matmul. XLA's Triton matmuls and merged
    matmuls (of queries, keys and values) do not, so that each bias takes another pass over memory.
    """
    if platform() not in GPUS or train.products:
        return None
    return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cublaslt": True, "xla_gpu_dot_merger_threshold_mb": 0}


def compute_for(train: TrainConfig) -> Compute:
    """Extracts the fields that layers read from a training config that `resolve_auto` has returned."""
    return Compute(**{f.name: getattr(train, f.name) for f in dataclasses.fields(Compute)})


def blocks_per_iteration(compute: Compute, num_layers: int, on: Optional[str] = None) -> int:
    """Returns the number of blocks in each iteration of the scan over `num_layers` layers.

    This number is `compute.scan_unroll`, or the platform's default if `scan_unroll` is 0, but at most `num_layers`.

    Args:
      on: a platform. If None, the platform of the current mesh (`jax.set_mesh`) is used.
    """
    on = on or platform()
    if compute.scan_unroll:
        return min(compute.scan_unroll, num_layers)
    if on == "cpu":
        return min(_CPU_UNROLLED, num_layers)
    return num_layers if on in GPUS and num_layers <= _MAX_UNROLLED else 1
