"""Makes repeated runs on a GPU bit-identical.

This module sets XLA flags, and stores autotuning results and compiled programs in the run's folder. CPUs and TPUs
are deterministic anyway. Source: https://openxla.org/xla/determinism.
"""

import os
from typing import Optional

import jax

from pretrainax.runtime.cluster import distributed_state

AUTOTUNING = "autotuning.textproto"  # in the folder of a run: XLA's kernel for each matmul and fusion
_VARIABLE = "XLA_FLAGS"
_SAME_ORDER = "--xla_gpu_exclude_nondeterministic_ops=true"  # no result depends on the order of threads


def set_deterministic_flags(folder: Optional[str] = None) -> None:
    """Adds flags that make results deterministic to XLA_FLAGS; must be called before JAX initializes its devices.

    Autotuning measures times, so it may choose different kernels when the run resumes. XLA therefore writes the
    autotuning results to `folder` (the run's folder) and reads them on resume. If `folder` is None, they are not
    stored.
    """
    flags = [_SAME_ORDER]
    if folder is not None:
        file = os.path.join(folder, AUTOTUNING)
        flags += [f"--xla_gpu_load_autotune_results_from='{file}'"] if os.path.exists(file) else []
        if distributed_state().process_id == 0:  # XLA sends the same results to all processes
            flags.append(f"--xla_gpu_dump_autotune_results_to='{file}'")
    existing = os.environ.get(_VARIABLE, "")
    os.environ[_VARIABLE] = " ".join(filter(None, (existing, *(flag for flag in flags if flag not in existing))))


def cache_programs_in(folder: str) -> None:
    """Stores compiled GPU programs in `folder` (the run's folder); must be called before the first compilation.

    Two compilations may differ even with the same autotuning results (https://github.com/openxla/xla/issues/49047).
    """
    if jax.default_backend() == "gpu":
        jax.config.update("jax_compilation_cache_dir", os.path.join(os.path.abspath(folder), "xla"))
