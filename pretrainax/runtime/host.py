"""The process before the first array: the allocator, JAX's compilation cache, the other processes of the run."""

import ctypes
import logging
import os
import resource
import sys
from typing import Optional

import jax

from pretrainax.config import Experiment, RunFailed, UserError
from pretrainax.files.paths import is_url
from pretrainax.runtime.cluster import OWN_NUMBERS, is_one_of_many
from pretrainax.runtime.libtpu import overlap_gathers
from pretrainax.storage.copies import copy_of

_FEW_FILES, _MANY_FILES = 128, 1 << 16  # what a small run needs; more than any does, though some systems allow no end
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


def allow_files() -> None:
    """Raises the limit on open files as far as the system lets this user; UserError where that is too few for a run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if most < _FEW_FILES:
        raise UserError(f"{most} files may be open at a time, and a run needs {_FEW_FILES}: raise `ulimit -n`")
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def start_jax(experiment: Experiment) -> None:
    """Tells libtpu how to compile, turns the persistent compilation cache on and, in a run of several processes, joins
    them."""
    allow_files()
    overlap_gathers()
    keep_compiled(experiment.data.cache_dir)
    _join_processes()


def keep_compiled(cache_dir: str) -> None:
    """Turns the persistent compilation cache on, JAX_COMPILATION_CACHE_DIR or a folder of `cache_dir`; before anything
    is compiled."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = copy_of(cache_dir, "work").root if is_url(cache_dir) else os.path.expanduser(cache_dir)
        jax.config.update("jax_compilation_cache_dir", os.path.join(folder, "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def start_devices() -> None:
    """Starts the devices of this process, as JAX_PLATFORMS says or of the fastest kind; UserError for one it lacks."""
    asked, log, reasons = os.environ.get("JAX_PLATFORMS"), logging.getLogger("jax._src.xla_bridge"), []

    def keep(record: logging.LogRecord) -> bool:
        """Keeps why a plugin failed for the error, instead of its traceback on the terminal."""
        failed = record.exc_info and record.exc_info[1]
        reasons.extend([str(failed)] if failed else [])
        return not failed

    log.addFilter(keep)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as e:  # the latter where the plugin of the only platform failed
        if not asked:
            raise
        reason = "; ".join(filter(None, (*reasons, str(e)))) or "it does not say why"
        raise UserError(
            f"JAX_PLATFORMS is {asked!r}, which JAX cannot start on this machine: unset it, or set it to cpu ({reason})"
        ) from e
    finally:
        log.removeFilter(keep)
    for reason in reasons:
        log.error("a plugin of JAX failed: %s", reason)


def _join_processes() -> None:
    """Joins the other processes, in a run of several, by `jax.distributed`.

    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID say it all. Without them
    JAX finds out from SLURM, Open MPI, Kubernetes or the TPU.
    """
    if not is_one_of_many():
        return
    # A signal is for `signals.PreemptionHandler`; JAX would install a handler of its own.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        if any(name in os.environ for name in OWN_NUMBERS):
            # "deactivate": under SLURM, JAX would show each process one GPU of its node
            count, index = (int(os.environ.get(name, "")) for name in OWN_NUMBERS)
            jax.distributed.initialize(
                num_processes=count,
                process_id=index,
                coordinator_bind_address=_bind_address(os.environ.get("JAX_COORDINATOR_ADDRESS", "")),
                cluster_detection_method="deactivate",
            )
        else:
            jax.distributed.initialize()
    except ValueError as e:
        names = "JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES=N and JAX_PROCESS_ID=0 to N-1"
        raise UserError(f"a run of several processes needs {names} in the environment: {e}") from e
    except RuntimeError as e:
        raise RunFailed(f"the processes of the run did not find each other: {e}") from e


def _bind_address(address: str) -> Optional[str]:
    """Returns where process 0 listens for the others: where all are on this machine, nowhere else; None: JAX says."""
    host = address.rpartition(":")[0].strip("[]")
    return address if host == "localhost" or host.startswith("127.") or host == "::1" else None
