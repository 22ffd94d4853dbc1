"""Reads the memory that this process can use: the memory of a device or, on a CPU, the memory of the machine."""

import math
import os
from collections.abc import Iterator
from typing import Optional

import jax

from pretrainax.config import UserError
from pretrainax.reporting.units import byte_size
from pretrainax.sharding.param_paths import PyTree

# Bytes that the compiler and the runtime need on a CPU in addition to the arrays: a run with 25 MB of parameters,
# moments and gradients, whose estimate was 0.12 GB, used 0.51 GB.
_CPU_OVERHEAD = 400_000_000


def device_memory() -> Optional[int]:
    """Returns the bytes that arrays can occupy on one of this process's devices, or None if this is unknown.

    The CPU devices of a process share the memory that the machine has available.
    """
    devices = jax.local_devices()
    if devices[0].platform != "cpu":
        return (devices[0].memory_stats() or {}).get("bytes_limit")
    available = available_memory()
    return None if available is None else max(available - _CPU_OVERHEAD, 0) // len(devices)


def check_parameters_fit(params: PyTree, description: str) -> None:
    """Raises UserError if the parameters need more memory than a device has.

    Args:
      params: jax.ShapeDtypeStructs with shardings.
      description: the model, for the message.
    """
    leaves = jax.tree.leaves(params)
    size = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    memory = device_memory()
    if memory is not None and size > memory:
        raise UserError(
            f"{description}: the parameters need {byte_size(size)} of memory per device, but a "
            f"{jax.local_devices()[0].device_kind} has {byte_size(memory)}: use a smaller model, or more devices"
        )


def available_memory(root: str = "/") -> Optional[int]:
    """Returns the bytes that this process can still allocate on its machine, or None if this is unknown.

    The result respects the limits of control groups (containers, Slurm). Swap space does not count.

    Args:
      root: folder that contains `proc` and `sys`.
    """
    return min((*_system_memory(root), *_group_memory(root)), default=None)


def _system_memory(root: str) -> Iterator[int]:
    """Yields the available memory of the machine; on systems without /proc, its total memory."""
    try:
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii") as f:
            yield from (1024 * int(line.split()[1]) for line in f if line.startswith("MemAvailable:"))
    except OSError:
        if "SC_PHYS_PAGES" in os.sysconf_names:
            yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_memory(root: str) -> Iterator[int]:
    """Yields the memory that is left in each control group of this process and in their parents, versions 1 and 2."""
    try:
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8", errors="replace") as f:
            groups = [line.rstrip("\n").split(":", 2) for line in f]
    except OSError:
        return
    for _, controllers, group in (fields for fields in groups if len(fields) == 3):
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = os.path.join(root, "sys/fs/cgroup", "memory" if controllers else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        parts = [part for part in group.split("/") if part and part != ".."]
        for depth in range(len(parts) + 1):  # in a container, only the root may exist
            folder = os.path.join(mount, *parts[:depth])
            limit, usage = (_number(os.path.join(folder, name)) for name in names)
            if limit is not None and usage is not None:
                yield max(limit - usage + _inactive_file_bytes(folder), 0)


def _number(path: str) -> Optional[int]:
    """Reads a number from a file; returns None if the file is missing or contains "max"."""
    try:
        with open(path, encoding="ascii") as f:
            return int(f.read())
    except (OSError, ValueError):
        return None


def _inactive_file_bytes(folder: str) -> int:
    """Reads the bytes of cached files in a control group, which the system frees when a process needs memory."""
    try:
        with open(os.path.join(folder, "memory.stat"), encoding="ascii") as f:
            numbers = dict(line.split() for line in f)
    except (OSError, ValueError):
        return 0
    return int(numbers.get("total_inactive_file", numbers.get("inactive_file", 0)))
