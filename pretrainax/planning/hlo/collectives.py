"""Finds the collectives (communication between devices) of a compiled step, with their mesh axes and bytes."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Optional, Union

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from pretrainax.planning.hlo.instructions import VIEWS, Instruction
from pretrainax.planning.hlo.kernels import IN_FUSIONS, multiplies, opcodes_of
from pretrainax.planning.hlo.modules import Modules, module_of
from pretrainax.planning.hlo.program import Program
from pretrainax.planning.traffic import Collective

AnyMesh = Union[Mesh, AbstractMesh]
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def collectives_of(program: Program, mesh: AnyMesh) -> list[Collective]:
    """Returns all collectives of a compiled step, largest first.

    The compiler may replace an all-gather and the following matmul, or a matmul and the following reduce-scatter, with
    a loop of collective-permutes. Such a loop counts as the original collective.

    Args:
      mesh: the mesh of the step. Its device order determines the meaning of device numbers in the HLO text.
    """
    instructions_by_key: dict[str, tuple[float, Instruction, str]] = {}
    for name, times in program.runs.items():
        for instruction in program.computations[name].values():
            if instruction.opcode.removesuffix("-start") in KINDS:
                key = f"{name}/{instruction.name}"
                if IN_FUSIONS in instruction.attributes:
                    key = f"{instruction.attribute('channel_id')} {instruction.op_name}"
                if key not in instructions_by_key or times < instructions_by_key[key][0]:
                    instructions_by_key[key] = times, instruction, name
    modules = Modules(program)
    total: collections.Counter = collections.Counter()
    overlapped: collections.Counter = collections.Counter()
    for times, instruction, name in instructions_by_key.values():
        operands = [program.computations[name][x] for x in instruction.operands]
        where = module_of(instruction.op_name) or modules.in_common(name, instruction)
        if collective := _collective(instruction, name, sum(x.size for x in operands), where, mesh):
            total[collective] += times
            overlapped[collective] += times * _overlaps_products(program, name, instruction)
    results = [
        dataclasses.replace(collective, count=math.ceil(n), overlapping=math.ceil(overlapped[collective]))
        for collective, n in total.items()
        if n
    ]
    return sorted(results, key=lambda collective: -collective.total)


def _overlaps_products(program: Program, computation: str, start: Instruction) -> bool:
    """Checks whether a matrix multiplication runs between the start and the end of a collective.

    The instructions of a computation are in execution order. A collective that runs inside fusions that also contain
    other work always overlaps.

    Args:
      start: the instruction that starts the collective.
    """
    if IN_FUSIONS in start.attributes or not start.opcode.endswith("-start"):
        return IN_FUSIONS in start.attributes
    from_start = itertools.dropwhile(lambda x: x is not start, program.computations[computation].values())
    is_end = lambda x: x.opcode.endswith("-done") and start.name in x.operands  # noqa: E731
    between = itertools.takewhile(lambda x: not is_end(x), itertools.islice(from_start, 1, None))
    return any(multiplies(x, opcodes_of(program, x)) for x in between if x.opcode not in VIEWS)


def _collective(
    instruction: Instruction, computation: str, size: int, where: str, mesh: AnyMesh
) -> Optional[Collective]:
    """Describes one execution of a collective, with the bytes each device sends; None if no data leaves a device.

    Args:
      computation: name of the computation that contains the instruction.
      size: size of the operands in bytes.
      where: path of the model's module that causes the collective.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind == "collective-permute":
        groups = np.array(re.findall(r"\{(\d+),(\d+)\}", instruction.attributes), int).reshape(-1, 2)
        sent = size
        if window := re.search(r"windowed_dot_general_body_(ag|rs)", computation):
            kind = {"ag": "all-gather", "rs": "reduce-scatter"}[window[1]]
    else:
        groups = replica_groups(instruction.attributes, mesh.size)
        n = groups.shape[1]
        if kind == "all-reduce" and "all-reduce-scatter" in computation:  # the TPU compiler's form of a reduce-scatter
            kind = "reduce-scatter"
        sent = {"all-gather": size * (n - 1), "all-reduce": 2 * size * (n - 1) // n}.get(kind, size * (n - 1) // n)
    axis = "+".join(_axes(groups, mesh))
    return Collective(axis, kind, sent, 1, where) if axis else None


def _axes(groups: np.ndarray, mesh: AnyMesh) -> Iterator[str]:
    """Yields the mesh axes along which the devices of a group differ.

    Args:
      groups: device positions in the mesh, [G, n] for G groups of n devices.
    """
    sizes = tuple(mesh.shape.values())
    for axis, coordinates in zip(mesh.shape, np.unravel_index(groups, sizes), strict=True):
        if (coordinates != coordinates[:, :1]).any():
            yield axis


def replica_groups(attributes: str, devices: int) -> np.ndarray:
    """Parses a collective's device groups from any of XLA's notations and returns the device numbers [G, n].

    - `{{0,1},{2,3}}`: one list of device numbers per group.
    - `[2,2]<=[4]`: the numbers 0 to 3 in an array of shape [2, 2]; each row is a group.
    - `[2,2]<=[2,2]T(1,0)`: the numbers in an array of shape [2, 2], transposed, then reshaped to [2, 2].
    - `mesh['a'=2,'b'=2] {'a'}`: groups along an axis of a mesh. `{'a':(1)2}` is a sub-axis: (product of the sub-axes
      before it), size. A mesh may have `device_ids=([2,2]T(1,0))` or `device_ids=(0,2,1,3)`.

    Args:
      attributes: the attributes of the instruction, as text.
      devices: the total number of devices.
    """
    text = attributes.split("replica_groups=", 1)[1]
    if text.startswith("{"):
        rows = re.findall(r"\{([\d,]+)\}", text[: text.index("}}") + 1]) if text.startswith("{{") else []
        return np.array([row.split(",") for row in rows], int) if rows else np.arange(devices)[None]
    if text.startswith("["):
        shape, source, permutation = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
        return _iota(source, permutation).reshape(_ints(shape))
    axes, device_ids, group_axes = re.match(
        r"mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? \{([^}]*)\}", text
    ).groups()
    sizes = {name.strip("'"): int(size) for name, size in (axis.split("=") for axis in axes.split(","))}
    numbers = np.arange(math.prod(sizes.values()))
    if device_ids:
        tiled = re.match(r"(?:\[[\d,]+\])?(?:<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?$", device_ids)
        numbers = _iota(*tiled.groups()) if tiled else np.array(_ints(device_ids))
    named_sub_axes = re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", group_axes)
    dims, group_dims = [], []  # sizes of axes, or of sub-axes if a group covers a sub-axis; indices of a group's axes
    for name, size in sizes.items():
        sub_axes = sorted(
            (int(preceding or 1), int(n or size)) for other, preceding, n in named_sub_axes if other == name
        )
        prefix = 1
        for preceding, n in sub_axes:
            dims += [preceding // prefix, n]
            group_dims.append(len(dims) - 1)
            prefix = preceding * n
        dims.append(size // prefix)
    other_dims = [i for i in range(len(dims)) if i not in group_dims]
    return numbers.reshape(dims).transpose(other_dims + group_dims).reshape(-1, math.prod(dims[i] for i in group_dims))


def _iota(dims: str, order: Optional[str]) -> np.ndarray:
    """Returns the numbers from 0 as an array of shape `dims` (such as "2,2"), transposed by `order`, then flattened."""
    numbers = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return (numbers.transpose(_ints(order)) if order else numbers).ravel()


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
