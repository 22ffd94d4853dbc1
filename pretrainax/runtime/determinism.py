"""Makes repeated runs on a GPU bit-identical.

It sets XLA flags, and stores autotuning results and compiled programs in the folder of the run.

CPUs and TPUs are deterministic without these flags. Source: https://openxla.org/xla/determinism.
"""

import os
from typing import Optional

import jax

from pretrainax.runtime.cluster import distributed_state

AUTOTUNING = "autotuning.textproto"  # in the folder of a run: XLA's kernel for each matrix product and fusion
_VARIABLE = "XLA_FLAGS"
_SAME_ORDER = "--xla_gpu_exclude_nondeterministic_ops=true"  # no result depends on the order of threads


def set_deterministic_flags(folder: Optional[str] = None) -> None:
    """Adds flags for deterministic results to XLA_FLAGS; call this function before the devices start.

    Autotuning measures times, so it may choose different kernels when the run resumes. XLA therefore writes the
    results of autotuning into `folder`, the folder of the run, and reads them when the run resumes. None: no file.
    """
    flags = [_SAME_ORDER]
    if folder is not None:
        file = os.path.join(folder, AUTOTUNING)
        flags += [f"--xla_gpu_load_autotune_results_from='{file}'"] if os.path.exists(file) else []
        if distributed_state().process_id == 0:  # XLA sends the same results to all processes
            flags.append(f"--xla_gpu_dump_autotune_results_to='{file}'")
    given = os.environ.get(_VARIABLE, "")
    os.environ[_VARIABLE] = " ".join(filter(None, (given, *(flag for flag in flags if flag not in given))))


def cache_programs_in(folder: str) -> None:
    """Stores compiled GPU programs in `folder`, the folder of the run; call this function before compilation.

    Two compilations may differ even with equal autotuning results (https://github.com/openxla/xla/issues/49047).
    """
    if jax.default_backend() == "gpu":
        jax.config.update("jax_compilation_cache_dir", os.path.join(os.path.abspath(folder), "xla"))
