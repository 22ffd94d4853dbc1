"""The mesh of devices: how many lie along each axis, and which is next to which."""

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

GPUS = ("gpu", "cuda")  # what JAX calls the platform of an NVIDIA GPU
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]  # jax types it as a variable


def make_mesh(config: MeshConfig, devices: Optional[Sequence[Device]] = None) -> Mesh:
    """Returns the mesh of AXES over all devices.

    Raises:
      UserError: as `mesh_sizes`, and slices that are not those of the devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(config, len(devices), len({device.process_index for device in devices}))
    array = _arrange(tuple(sizes.values()), config.slices, devices)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def abstract_mesh(sizes: dict[str, int], platform: str) -> AbstractMesh:
    """Returns a mesh to trace for. Neither the devices nor their compiler need be there."""
    device = AbstractDevice(platform, None, platform)
    axis_types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(tuple(sizes[axis] for axis in AXES), AXES, axis_types=axis_types, abstract_device=device)


def mesh_sizes(config: MeshConfig, devices: int, processes: int) -> dict[str, int]:
    """Returns the number of devices along each of AXES; an axis of -1 takes what the others leave.

    Raises:
      UserError: sizes whose product is not the number of devices, or rows of the batch that would span processes.
    """
    sizes = {axis: getattr(config, axis) for axis in AXES}
    got = ", ".join(f"config.mesh.{axis}={size}" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise UserError(f"{got}: sizes are at least 1, and at most one of them is -1 (all devices that are left)")
    if free:
        sizes[free[0]] = max(devices // math.prod(s for s in sizes.values() if s != -1), 1)
    if math.prod(sizes.values()) != devices:
        raise UserError(f"{got}: the product must be the number of devices, which is {devices}")
    in_a_row, of_process = math.prod(sizes[axis] for axis in AXES if axis not in BATCH_AXES), devices // processes
    if in_a_row % of_process and of_process % in_a_row:
        others = " × ".join(f"config.mesh.{axis}" for axis in AXES if axis not in BATCH_AXES)
        raise UserError(
            f"{got}: {others} is {in_a_row}, it must divide the {of_process} devices of a process, or be a multiple of "
            "them: a process has whole rows of the batch, or a part of one share of the rows"
        )
    if sizes[DATA_AXIS] % config.slices:
        raise UserError(f"{got}: config.mesh.{DATA_AXIS} must be a multiple of config.mesh.slices {config.slices}")
    return sizes


def _arrange(sizes: tuple[int, ...], slices: int, devices: Sequence[Device]) -> np.ndarray:
    """Returns the devices as an array of `sizes`, slice after slice along the first axis, and as near to each other
    within a slice as its wires allow.

    A process reads the rows of its own devices. Where in that order two processes would have rows in common that need
    not be, as they may on a torus whose hosts are smaller than a row's devices are far apart, devices are taken host by
    host instead.
    """
    within = (sizes[0] // slices, *sizes[1:])
    arrange = functools.partial(mesh_utils.create_device_mesh, within, allow_split_physical_axes=True)
    parts = [arrange(part) for part in _devices_of_slices(devices, slices)]
    of_process, count = _row_parts(np.concatenate(parts)), math.prod(sizes[: len(BATCH_AXES)])
    shares = set(of_process.values())
    if len(shares) < min(len(of_process), count) or sum(map(len, shares)) > count:
        parts = [np.array(sorted(p.flat, key=lambda d: (d.process_index, d.id))).reshape(within) for p in parts]
    return np.concatenate(parts)


def _row_parts(devices: np.ndarray) -> dict[int, tuple[int, ...]]:
    """Returns which of the parts that the mesh cuts the rows of a batch into each process has, by its number."""
    found: dict[int, dict[int, None]] = {}
    for part, row in enumerate(devices.reshape(math.prod(devices.shape[: len(BATCH_AXES)]), -1)):
        for device in row:
            found.setdefault(device.process_index, {})[part] = None
    return {process: tuple(found[process]) for process in sorted(found)}


class Share(NamedTuple):
    """Says which rows of each batch a process reads, of so many equal shares. Processes whose devices have the same
    rows, each a part of their length or of the width, read the same share."""

    index: int
    count: int
    parts: tuple[int, ...]  # where its rows go, in their order, among the parts that the mesh cuts the rows into


def share_of(mesh: Mesh, process: int) -> Share:
    """Returns the share of a process."""
    parts = _row_parts(mesh.devices)
    shares = list(dict.fromkeys(parts.values()))
    return Share(shares.index(parts[process]), len(shares), parts[process])


def _devices_of_slices(devices: Sequence[Device], count: int) -> list[list[Device]]:
    """Returns the devices of each slice. TPUs know theirs; others are cut into equal ranges of processes."""
    found = {}
    for device in devices:
        found.setdefault(getattr(device, "slice_index", 0) if device.platform == "tpu" else 0, []).append(device)
    if len(found) > 1 and len(found) != count:
        raise UserError(f"config.mesh.slices is {count}, and the devices are of {len(found)} slices: set it to that")
    if len(found) == count:
        return [found[index] for index in sorted(found)]
    size = len(devices) // count
    return [list(devices[i * size : (i + 1) * size]) for i in range(count)]


def axis_size(axes: Union[str, tuple[str, ...]]) -> int:
    """Returns the size of an axis of the mesh of `jax.set_mesh`, or of several together; 1 without a mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes.get(axis, 1) for axis in ((axes,) if isinstance(axes, str) else axes))


def free_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of the axes by which no `jax.shard_map` around has split its arrays already."""
    taken = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis not in taken)


def platform() -> str:
    """Returns "cpu", "gpu" or "tpu": the platform of the devices of `jax.set_mesh`, which may be absent ones to compile
    for; without it, that of this machine."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
