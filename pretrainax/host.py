"""The process before the first array: the allocator, JAX's compilation cache, the other processes of the run."""

import ctypes
import dataclasses
import os
import sys

import jax

from pretrainax.config import Experiment, TrainConfig
from pretrainax.layers.compute import Compute

# <malloc.h>: parameters of mallopt(3)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def tune_malloc() -> None:
    """Keeps freed memory in the process, on Linux with glibc.

    glibc maps and unmaps every block over 32 MB, so a training step on a CPU spends half of its time in page faults.
    """
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL(None).mallopt
        except AttributeError:  # musl has none
            return
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_ARENA_MAX, 1)  # threads share what is free
        mallopt(_M_TRIM_THRESHOLD, -1)  # never give memory back
        mallopt(_M_TOP_PAD, 1 << 28)  # bytes asked for beyond what is needed


def start_jax(experiment: Experiment) -> None:
    """Turns the persistent compilation cache on and, in a run of several processes, joins them."""
    cache = os.path.join(os.path.expanduser(experiment.data.cache_dir), "xla")
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if _is_one_of_many():
        jax.distributed.initialize()


def _is_one_of_many() -> bool:
    env = os.environ
    return (
        "JAX_COORDINATOR_ADDRESS" in env
        or int(env.get("SLURM_NTASKS", "1")) > 1
        or "," in env.get("TPU_WORKER_HOSTNAMES", "")
    )


def for_this_machine(train: TrainConfig) -> TrainConfig:
    """`train` with each "auto" and 0 replaced by what suits the devices at hand."""
    on_cpu = jax.default_backend() == "cpu"
    return dataclasses.replace(
        train,
        dtype=("float32" if on_cpu else "bfloat16") if train.dtype == "auto" else train.dtype,
        scan_unroll=train.scan_unroll or (4 if on_cpu else 1),
        loss_chunk=train.loss_chunk or (1024 if on_cpu else 4096),
    )


def compute_for(train: TrainConfig) -> Compute:
    """The fields that layers read, of what `for_this_machine` returned."""
    return Compute(**{f.name: getattr(train, f.name) for f in dataclasses.fields(Compute)})
