"""Sets up a process before it creates arrays: allocator, compilation cache, and connections to other processes."""

import ctypes
import logging
import os
import resource
import sys
from typing import Optional

import jax

from pretrainax.config import Experiment, RunFailed, UserError
from pretrainax.files.paths import is_url
from pretrainax.runtime.cluster import PROCESS_VARIABLES, is_multi_process
from pretrainax.runtime.libtpu import overlap_gathers
from pretrainax.storage.copies import copy_of

_MIN_FILES, _MAX_FILES = 128, 1 << 16  # limits on open files: the minimum for a small run; more than any run needs
# Parameters of mallopt(3), from <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def tune_malloc() -> None:
    """Configures glibc's malloc (on Linux) to keep freed memory instead of returning it to the system.

    By default glibc maps and unmaps every block above 32 MB. A training step on a CPU then spends half of its time in
    page faults.
    """
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL(None).mallopt
        except AttributeError:  # musl has no mallopt
            return
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_ARENA_MAX, 1)  # threads share free memory
        mallopt(_M_TRIM_THRESHOLD, -1)  # never return memory to the system
        mallopt(_M_TOP_PAD, 1 << 28)  # additional bytes to request from the system


def raise_open_file_limit() -> None:
    """Raises the limit on open files as far as the system allows; raises UserError if that is not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_limit = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if new_limit < _MIN_FILES:
        raise UserError(
            f"the limit on open files is {new_limit}; a run needs at least {_MIN_FILES}: raise it with `ulimit -n`"
        )
    if soft != resource.RLIM_INFINITY and soft < new_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))


def start_jax(experiment: Experiment) -> None:
    """Sets libtpu's flags, enables the persistent compilation cache, and connects to the other processes of the run."""
    raise_open_file_limit()
    overlap_gathers()
    enable_compilation_cache(experiment.data.cache_dir)
    _join_processes()


def enable_compilation_cache(cache_dir: str) -> None:
    """Enables the persistent compilation cache; must be called before the first compilation.

    The cache is in JAX_COMPILATION_CACHE_DIR, or in a folder of `cache_dir` if the variable is not set.
    """
    if jax.config.jax_compilation_cache_dir is None:
        folder = copy_of(cache_dir, "work").root if is_url(cache_dir) else os.path.expanduser(cache_dir)
        jax.config.update("jax_compilation_cache_dir", os.path.join(folder, "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def start_devices() -> None:
    """Initializes JAX's devices on the platform in JAX_PLATFORMS, by default the fastest available one.

    Raises:
      UserError: JAX cannot start the devices.
    """
    requested, log, reasons = os.environ.get("JAX_PLATFORMS"), logging.getLogger("jax._src.xla_bridge"), []

    def is_no_failure(record: logging.LogRecord) -> bool:
        """Drops log records of failed plugins, and collects their errors in `reasons` for the error message."""
        error = record.exc_info and record.exc_info[1]
        reasons.extend([str(error)] if error else [])
        return not error

    log.addFilter(is_no_failure)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as e:  # AssertionError: the plugin of the only platform failed
        if not requested:
            raise
        reason = "; ".join(filter(None, (*reasons, str(e)))) or "JAX gives no reason"
        raise UserError(
            f"JAX_PLATFORMS is {requested!r}, which JAX cannot start on this machine: unset it, or set it to cpu "
            f"({reason})"
        ) from e
    finally:
        log.removeFilter(is_no_failure)
    for reason in reasons:
        log.error("a JAX plugin failed: %s", reason)


def _join_processes() -> None:
    """Connects this process to the other processes of the run, if any, with `jax.distributed`.

    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID define the run. Without
    them, JAX detects SLURM, Open MPI, Kubernetes or the TPU.
    """
    if not is_multi_process():
        return
    # `signals.PreemptionHandler` handles signals; JAX must not install its own handler.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        if any(name in os.environ for name in PROCESS_VARIABLES):
            # "deactivate": under SLURM, JAX would show each process one GPU of its node
            count, index = (int(os.environ.get(name, "")) for name in PROCESS_VARIABLES)
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
        raise RunFailed(f"the processes of the run could not connect: {e}") from e


def _bind_address(address: str) -> Optional[str]:
    """Returns the address on which process 0 must listen: `address` if it is a loopback address, otherwise None.

    None selects JAX's default, which is to listen on all interfaces.
    """
    host = address.rpartition(":")[0].strip("[]")
    return address if host == "localhost" or host.startswith("127.") or host == "::1" else None
