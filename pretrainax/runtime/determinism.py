"""Has a GPU compute the same bits again: XLA's flags, and what its compiler has chosen, kept with the run.

A CPU and a TPU do so by themselves. XLA's own account: https://openxla.org/xla/determinism.
"""

import os
from typing import Optional

import jax

from pretrainax.runtime.cluster import distributed_state

AUTOTUNING = "autotuning.textproto"  # in the folder of a run: the kernel that XLA took for each product and fusion
_VARIABLE = "XLA_FLAGS"
_SAME_ORDER = "--xla_gpu_exclude_nondeterministic_ops=true"  # no sum in the order in which threads arrive


def ask_for_same_bits(folder: Optional[str] = None) -> None:
    """Adds the flags to XLA_FLAGS, before the devices start.

    folder: of the run. What autotuning finds is written there, and taken from there by the next start: it goes by
    times, and could find another kernel the next time.
    """
    flags = [_SAME_ORDER]
    if folder is not None:
        file = os.path.join(folder, AUTOTUNING)
        flags += [f"--xla_gpu_load_autotune_results_from='{file}'"] if os.path.exists(file) else []
        if distributed_state().process_id == 0:  # XLA gives all processes the same results
            flags.append(f"--xla_gpu_dump_autotune_results_to='{file}'")
    given = os.environ.get(_VARIABLE, "")
    os.environ[_VARIABLE] = " ".join(filter(None, (given, *(flag for flag in flags if flag not in given))))


def keep_programs(folder: str) -> None:
    """Keeps what is compiled for a GPU with the run, as even with equal autotuning two compilations may differ
    (https://github.com/openxla/xla/issues/49047); before anything is compiled."""
    if jax.default_backend() == "gpu":
        jax.config.update("jax_compilation_cache_dir", os.path.join(os.path.abspath(folder), "xla"))
