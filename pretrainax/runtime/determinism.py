"""Makes results on a GPU bit-identical: sets XLA flags, and stores autotuning results and programs with the run.

CPUs and TPUs are deterministic without these flags. Source: https://openxla.org/xla/determinism.
"""

import os
from typing import Optional

import jax

from pretrainax.runtime.cluster import distributed_state

AUTOTUNING = "autotuning.textproto"  # in the folder of a run: the kernel that XLA chose for each product and fusion
_VARIABLE = "XLA_FLAGS"
_SAME_ORDER = "--xla_gpu_exclude_nondeterministic_ops=true"  # sums do not depend on the order of threads


def set_deterministic_flags(folder: Optional[str] = None) -> None:
    """Adds the flags to XLA_FLAGS; call it before the devices start.

    Autotuning measures times, so it may choose other kernels at the next start. It therefore writes its results into
    `folder`, the folder of the run, and the next start reads them.
    """
    flags = [_SAME_ORDER]
    if folder is not None:
        file = os.path.join(folder, AUTOTUNING)
        flags += [f"--xla_gpu_load_autotune_results_from='{file}'"] if os.path.exists(file) else []
        if distributed_state().process_id == 0:  # XLA gives all processes the same results
            flags.append(f"--xla_gpu_dump_autotune_results_to='{file}'")
    given = os.environ.get(_VARIABLE, "")
    os.environ[_VARIABLE] = " ".join(filter(None, (given, *(flag for flag in flags if flag not in given))))


def cache_programs_in(folder: str) -> None:
    """Stores the programs of a GPU in the folder of the run; call it before the first compilation.

    Two compilations may differ even with equal autotuning results (https://github.com/openxla/xla/issues/49047).
    """
    if jax.default_backend() == "gpu":
        jax.config.update("jax_compilation_cache_dir", os.path.join(os.path.abspath(folder), "xla"))
