"""Builds the device mesh: axis sizes, the arrangement of devices, and each process's batch rows."""

import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple, Optional, TypeAlias, Union

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from pretrainax.config import MeshConfig, UserError
from pretrainax.sharding.axes import AXES, BATCH_AXES, DATA_AXIS

GPUS = ("gpu", "cuda")  # JAX's platform names of NVIDIA GPUs
TRITON_CAPABILITY = (8, 0)  # XLA compiles Triton, and cuDNN has fused attention, for GPUs from Ampere on
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]  # jax types it as a variable


def make_mesh(config: MeshConfig, devices: Optional[Sequence[Device]] = None) -> Mesh:
    """Builds the device mesh with the axes AXES.

    Args:
      config: the size of each mesh axis.
      devices: the devices of the mesh, by default all devices of all processes.

    Raises:
      UserError: as in `mesh_sizes`, or `config.slices` differs from the devices' number of TPU slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(config, len(devices), len({device.process_index for device in devices}))
    array = _arrange(tuple(sizes.values()), config.slices, devices)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def abstract_mesh(sizes: dict[str, int], platform: str) -> AbstractMesh:
    """Builds an abstract mesh without devices, for tracing.

    Args:
      sizes: the number of devices along each of AXES.
      platform: "cpu", "gpu" or "tpu".
    """
    device = AbstractDevice(platform, None, platform)
    axis_types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(tuple(sizes[axis] for axis in AXES), AXES, axis_types=axis_types, abstract_device=device)


def mesh_sizes(config: MeshConfig, devices: int, processes: int) -> dict[str, int]:
    """Computes the number of devices along each axis in AXES, replacing -1 with the number of remaining devices.

    Args:
      config: the size of each mesh axis.
      devices, processes: the total number of devices and of processes.

    Raises:
      UserError: a size is invalid. The product of the sizes is not the number of devices. The number of devices per
        batch row neither divides nor is a multiple of the number per process. `config.slices` does not divide the size
        of the axis `data`.
    """
    sizes = {axis: getattr(config, axis) for axis in AXES}
    settings = ", ".join(f"config.mesh.{axis}={size}" for axis, size in sizes.items())
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise UserError(f"{settings}: sizes are at least 1, and at most one of them is -1 (all remaining devices)")
    if open_axes:
        sizes[open_axes[0]] = max(devices // math.prod(s for s in sizes.values() if s != -1), 1)
    if math.prod(sizes.values()) != devices:
        raise UserError(f"{settings}: the product must be the number of devices, which is {devices}")
    devices_per_row, devices_per_process = (
        math.prod(sizes[axis] for axis in AXES if axis not in BATCH_AXES),
        devices // processes,
    )
    if devices_per_row % devices_per_process and devices_per_process % devices_per_row:
        row_axes = " × ".join(f"config.mesh.{axis}" for axis in AXES if axis not in BATCH_AXES)
        raise UserError(
            f"{settings}: {row_axes} is {devices_per_row}, it must divide the {devices_per_process} devices of a "
            "process, or be a multiple of their number: a process has whole rows of the batch, or a part of one share "
            "of the rows"
        )
    if sizes[DATA_AXIS] % config.slices:
        raise UserError(f"{settings}: config.mesh.{DATA_AXIS} must be a multiple of config.mesh.slices {config.slices}")
    return sizes


def _arrange(sizes: tuple[int, ...], slices: int, devices: Sequence[Device]) -> np.ndarray:
    """Arranges the devices in an array of shape `sizes`, with the slices along the first axis.

    Devices of a slice that are close in the network are neighbors in the array. Each process loads the batch rows of
    its devices. In network order, two processes may have to load the same rows, for example on a torus if the devices
    of a row span several small hosts. In that case, this function sorts the devices by host instead.
    """
    slice_shape = (sizes[0] // slices, *sizes[1:])
    arrange = functools.partial(mesh_utils.create_device_mesh, slice_shape, allow_split_physical_axes=True)
    slice_arrays = [arrange(slice_devices) for slice_devices in _devices_of_slices(devices, slices)]
    parts_of_process, num_parts = _row_parts(np.concatenate(slice_arrays)), math.prod(sizes[: len(BATCH_AXES)])
    distinct_parts = set(parts_of_process.values())
    if len(distinct_parts) < min(len(parts_of_process), num_parts) or sum(map(len, distinct_parts)) > num_parts:
        slice_arrays = [
            np.array(sorted(array.flat, key=lambda d: (d.process_index, d.id))).reshape(slice_shape)
            for array in slice_arrays
        ]
    return np.concatenate(slice_arrays)


def _row_parts(devices: np.ndarray) -> dict[int, tuple[int, ...]]:
    """Maps each process index to the numbers of the batch parts that the process's devices hold.

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
    """The rows of each batch that a process loads: share `index` of `count` equal shares of the rows.

    Processes whose devices hold different slices of the same rows (along the length or width) load the same share.
    """

    index: int  # from 0
    count: int  # number of shares
    parts: tuple[int, ...]  # the numbers of the batch parts in the share (see `_row_parts`), in order


def batch_share(mesh: Mesh, process: int) -> BatchShare:
    """Returns the share of each batch that the process with index `process` loads."""
    parts = _row_parts(mesh.devices)
    shares = list(dict.fromkeys(parts.values()))
    return BatchShare(shares.index(parts[process]), len(shares), parts[process])


def _devices_of_slices(devices: Sequence[Device], count: int) -> list[list[Device]]:
    """Groups the devices into `count` slices; returns each slice's devices.

    Devices other than TPUs, and TPUs of a single slice, are split into `count` consecutive groups of equal size.

    Raises:
      UserError: the TPUs belong to more than one slice, and the number of their slices is not `count`.
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
    """Returns the number of devices along axes of the mesh set by `jax.set_mesh`, or 1 if no mesh is set."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes.get(axis, 1) for axis in ((axes,) if isinstance(axes, str) else axes))


def free_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the mesh axes in `axes` that are not manual axes of an enclosing `jax.shard_map`."""
    manual_axes = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis not in manual_axes)


def platform() -> str:
    """Returns the platform of the mesh set by `jax.set_mesh`, or of this machine if no mesh is set.

    The platform is "cpu", "gpu" or "tpu". An abstract mesh may have a different platform than this machine.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def gpu_capability() -> tuple[int, int]:
    """Returns the compute capability of this process's GPUs: (8, 9) for an L4.

    Without GPUs, for example when the step is compiled for another machine, it is (9, 0), as for an H100. For AMD's
    GPUs, whose architectures have names like gfx942, it is (0, 0): they run none of the kernels that require a compute
    capability.
    """
    if jax.default_backend() != "gpu":
        return 9, 0
    number = re.fullmatch(r"(\d+)\.(\d+)", jax.local_devices()[0].compute_capability)
    return (int(number[1]), int(number[2])) if number else (0, 0)
