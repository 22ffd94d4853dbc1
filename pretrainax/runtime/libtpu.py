"""Sets libtpu's compiler flags before libtpu loads, for a run or when `plan` compiles for TPUs of another machine."""

import os

_VARIABLE = "LIBTPU_INIT_ARGS"
# The flags overlap an all-gather of parameters with the matmul before their use, in one fusion. libtpu 0.0.42 does this
# by default only on v5e. Fraction of the all-gather bytes that overlap with matmuls, in the compiled program of 2
# layers of LLaMA 3 8B: on v5p:4x4x4 with data 2 and fsdp 32, 47 % (without the flags 0 %); on v6e:4x4 with fsdp 16,
# 46 % (without the flags 33 %). The flags for all-reduces and reduce-scatters (…_fuse_all_reduce,
# xla_enable_async_all_reduce, xla_enable_async_reduce_scatter_fusion) do not change the step on v5p.
_FLAGS = (
    "--xla_enable_async_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",  # over several matmuls if one is too short
    "--xla_tpu_overlap_compute_collective_tc=true",
)


def overlap_gathers() -> None:
    """Sets LIBTPU_INIT_ARGS so that all-gathers of parameters overlap with matrix multiplications.

    A value that is already set remains unchanged.
    """
    os.environ.setdefault(_VARIABLE, " ".join(_FLAGS))
