"""The mesh of devices: how many lie along each axis, and which is next to which."""

import functools
import math
from collections.abc import Sequence
from typing import Optional, TypeAlias, Union

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
    if math.prod(sizes[axis] for axis in BATCH_AXES) % processes:
        others = " × ".join(f"config.mesh.{axis}" for axis in AXES if axis not in BATCH_AXES)
        raise UserError(
            f"{got}: {others} must divide the {devices // processes} devices of a process, which reads whole rows of "
            "the batch"
        )
    if sizes[DATA_AXIS] % config.slices:
        raise UserError(f"{got}: config.mesh.{DATA_AXIS} must be a multiple of config.mesh.slices {config.slices}")
    return sizes


def _arrange(sizes: tuple[int, ...], slices: int, devices: Sequence[Device]) -> np.ndarray:
    """Returns the devices as an array of `sizes`, slice after slice along the first axis, and as near to each other
    within a slice as its wires allow.

    A process reads the rows of its own devices. Where that order would give a row to two processes, as it may on a
    torus whose hosts are smaller than a row's devices are far apart, devices are taken host by host instead.
    """
    within = (sizes[0] // slices, *sizes[1:])
    arrange = functools.partial(mesh_utils.create_device_mesh, within, allow_split_physical_axes=True)
    parts = [arrange(part) for part in _devices_of_slices(devices, slices)]
    in_a_row = math.prod(sizes[len(BATCH_AXES) :])  # devices that share a row of the batch
    if any(len({d.process_index for d in row}) > 1 for part in parts for row in part.reshape(-1, in_a_row)):
        parts = [np.array(sorted(p.flat, key=lambda d: (d.process_index, d.id))).reshape(within) for p in parts]
    return np.concatenate(parts)


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
