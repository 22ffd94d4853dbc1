"""Makes repeated runs on a GPU bit-identical.

This module sets an XLA flag, and stores compiled programs and autotuning results in the run's folder. CPUs and TPUs
are deterministic anyway. Source: https://openxla.org/xla/determinism.
"""

import os

import jax

PROGRAMS = "xla"  # in the folder of a run: compiled programs, and XLA's kernel for each matmul and fusion
_VARIABLE = "XLA_FLAGS"
_SAME_ORDER = "--xla_gpu_exclude_nondeterministic_ops=true"  # no result depends on the order of threads


def set_deterministic_flag() -> None:
    """Adds a flag that makes results deterministic to XLA_FLAGS; must be called before JAX initializes its devices.

    The flags are part of the key of a stored program. A flag that named a file would differ when the run resumes.
    """
    existing = os.environ.get(_VARIABLE, "")
    if _SAME_ORDER not in existing:
        os.environ[_VARIABLE] = f"{existing} {_SAME_ORDER}".strip()


def cache_programs_in(folder: str) -> None:
    """Stores compiled GPU programs in `folder` (the run's folder); must be called before the first compilation.

    Autotuning measures times, so it may choose different kernels when the run resumes. JAX makes XLA store its results
    next to the programs (`jax_persistent_cache_enable_xla_caches`). They do not replace the programs: two compilations
    may differ even with the same results (https://github.com/openxla/xla/issues/49047).
    """
    if jax.default_backend() == "gpu":
        jax.config.update("jax_compilation_cache_dir", os.path.join(os.path.abspath(folder), PROGRAMS))
