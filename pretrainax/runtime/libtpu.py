"""Tells libtpu how to compile, before it is loaded: in a run, and where `plan` compiles for TPUs that are not there."""

import os

_VARIABLE = "LIBTPU_INIT_ARGS"
# Gathers of parameters begin before the product that stands before their use, and end behind it, in a fusion with it.
# That is the default of libtpu 0.0.42 on v5e alone. As compiled, of what the gathers of 2 layers of LLaMA 3 8B send, so
# much goes while products run: on v5p:4x4x4, data 2 and fsdp 32, 47 % (without the flags nothing); on v6e:4x4, fsdp 16,
# 46 % (33 %). Its flags for all-reduces and reduce-scatters (…_fuse_all_reduce, xla_enable_async_all_reduce,
# xla_enable_async_reduce_scatter_fusion) change nothing in the step for v5p.
_FLAGS = (
    "--xla_enable_async_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",  # over several products, where one is too short
    "--xla_tpu_overlap_compute_collective_tc=true",
)


def overlap_gathers() -> None:
    """Has a TPU gather parameters while it multiplies, unless LIBTPU_INIT_ARGS says otherwise: its value is kept."""
    os.environ.setdefault(_VARIABLE, " ".join(_FLAGS))
