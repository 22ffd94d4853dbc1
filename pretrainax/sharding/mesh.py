"""Builds the device mesh: the size of each axis, the arrangement of devices, and the batch rows of each process."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, Optional, TypeAlias, Union

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from pretrainax.config import MeshConfig, UserError
from pretrainax.sharding.axes import AXES, BATCH_AXES, DATA_AXIS

GPUS = ("gpu", "cuda")  # JAX's platform names of NVIDIA GPUs
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]  # jax types it as a variable


def make_mesh(config: MeshConfig, devices: Optional[Sequence[Device]] = None) -> Mesh:
    """Returns the device mesh with the axes AXES.

    Args:
      devices: None: all devices of all processes.

    Raises:
      UserError: as in `mesh_sizes`, or `config.slices` differs from the number of TPU slices of the devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(config, len(devices), len({device.process_index for device in devices}))
    array = _arrange(tuple(sizes.values()), config.slices, devices)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def abstract_mesh(sizes: dict[str, int], platform: str) -> AbstractMesh:
    """Returns a mesh without devices, for tracing.

    Args:
      sizes: the number of devices along each of AXES.
      platform: "cpu", "gpu" or "tpu".
    """
    device = AbstractDevice(platform, None, platform)
    axis_types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(tuple(sizes[axis] for axis in AXES), AXES, axis_types=axis_types, abstract_device=device)


def mesh_sizes(config: MeshConfig, devices: int, processes: int) -> dict[str, int]:
    """Returns the number of devices along each of AXES; an axis of size -1 in the config gets the remaining devices.

    Args:
      devices, processes: the total numbers.

    Raises:
      UserError: the product of the sizes is not the number of devices; the devices of a batch row do not fit the
        devices of a process (one number must divide the other); or `config.slices` does not divide the axis `data`.
    """
    sizes = {axis: getattr(config, axis) for axis in AXES}
    got = ", ".join(f"config.mesh.{axis}={size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise UserError(f"{got}: sizes are at least 1, and at most one of them is -1 (all remaining devices)")
    if free:
        sizes[free[0]] = max(devices // math.prod(s for s in sizes.values() if s != -1), 1)
    if math.prod(sizes.values()) != devices:
        raise UserError(f"{got}: the product must be the number of devices, which is {devices}")
    per_row, per_process = math.prod(sizes[axis] for axis in AXES if axis not in BATCH_AXES), devices // processes
    if per_row % per_process and per_process % per_row:
        others = " × ".join(f"config.mesh.{axis}" for axis in AXES if axis not in BATCH_AXES)
        raise UserError(
            f"{got}: {others} is {per_row}, it must divide the {per_process} devices of a process, or be a multiple of "
            "their number: a process has whole rows of the batch, or a part of one share of the rows"
        )
    if sizes[DATA_AXIS] % config.slices:
        raise UserError(f"{got}: config.mesh.{DATA_AXIS} must be a multiple of config.mesh.slices {config.slices}")
    return sizes


def _arrange(sizes: tuple[int, ...], slices: int, devices: Sequence[Device]) -> np.ndarray:
    """Returns the devices as an array of shape `sizes`, with the slices along the first axis.

    Within a slice, devices that are close in the network are neighbors in the array. A process loads the batch rows of
    its own devices. With this order, two processes may have to load the same rows although a different order avoids it.
    In that case, the devices are ordered host by host instead. This may happen on a torus if the devices of a row span
    several small hosts.
    """
    within = (sizes[0] // slices, *sizes[1:])
    arrange = functools.partial(mesh_utils.create_device_mesh, within, allow_split_physical_axes=True)
    parts = [arrange(part) for part in _devices_of_slices(devices, slices)]
    parts_of_process, count = _row_parts(np.concatenate(parts)), math.prod(sizes[: len(BATCH_AXES)])
    shares = set(parts_of_process.values())
    if len(shares) < min(len(parts_of_process), count) or sum(map(len, shares)) > count:
        parts = [np.array(sorted(p.flat, key=lambda d: (d.process_index, d.id))).reshape(within) for p in parts]
    return np.concatenate(parts)


def _row_parts(devices: np.ndarray) -> dict[int, tuple[int, ...]]:
    """Returns {process index: parts of a batch that its devices hold}.

    The mesh splits the rows of a batch into equal parts, which are numbered from 0.

    Args:
      devices: the devices of a mesh, as an array with the axes AXES.
    """
    parts: dict[int, dict[int, None]] = {}
    for part, row in enumerate(devices.reshape(math.prod(devices.shape[: len(BATCH_AXES)]), -1)):
        for device in row:
            parts.setdefault(device.process_index, {})[part] = None
    return {process: tuple(parts[process]) for process in sorted(parts)}


class BatchShare(NamedTuple):
    """The share of each batch that a process reads: share `index` of `count` equal shares of the rows.

    If the devices of several processes hold different parts of the length or width of the same rows, these processes
    read the same share.
    """

    index: int
    count: int
    parts: tuple[int, ...]  # the numbers of the parts in the share (see `_row_parts`), in order


def batch_share(mesh: Mesh, process: int) -> BatchShare:
    """Returns the share of each batch that the process with index `process` reads."""
    parts = _row_parts(mesh.devices)
    shares = list(dict.fromkeys(parts.values()))
    return BatchShare(shares.index(parts[process]), len(shares), parts[process])


def _devices_of_slices(devices: Sequence[Device], count: int) -> list[list[Device]]:
    """Returns the devices of each of `count` slices.

    Devices that are not TPUs, and TPUs of a single slice, are split into equal ranges.
    """
    slices = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0) if device.platform == "tpu" else 0, []).append(device)
    if len(slices) > 1 and len(slices) != count:
        raise UserError(f"config.mesh.slices is {count}, and the devices are of {len(slices)} slices: set it to that")
    if len(slices) == count:
        return [slices[index] for index in sorted(slices)]
    size = len(devices) // count
    return [list(devices[i * size : (i + 1) * size]) for i in range(count)]


def axis_size(axes: Union[str, tuple[str, ...]]) -> int:
    """Returns the number of devices along one or more axes of the mesh set by `jax.set_mesh`; 1 if no mesh is set."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes.get(axis, 1) for axis in ((axes,) if isinstance(axes, str) else axes))


def free_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of the given mesh axes that are not manual axes of an enclosing `jax.shard_map`."""
    taken = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis not in taken)


def platform() -> str:
    """Returns "cpu", "gpu" or "tpu": the platform of the mesh of `jax.set_mesh`; without a mesh, of this machine.

    The platform of an abstract mesh may differ from the platform of this machine.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
