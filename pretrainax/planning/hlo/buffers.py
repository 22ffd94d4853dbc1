"""Finds the largest arrays that a compiled step allocates."""

from collections.abc import Iterator
from typing import NamedTuple

from pretrainax.planning.hlo.instructions import VIEWS
from pretrainax.planning.hlo.modules import Modules
from pretrainax.planning.hlo.program import Program


class Buffer(NamedTuple):
    """An array that a compiled step allocates in the main memory of a device."""

    where: str  # path of the module that computes the array
    bytes: int  # including the padding of the array's layout
    shape: str  # "bf16[8,512,512]"


def buffers_of(program: Program, most: int = 20) -> list[Buffer]:
    """Returns the largest arrays that a step computes, largest first.

    Arrays with the same shape and module are listed once. The arrays do not all exist at the same time.

    Args:
      most: maximum number of arrays.
    """
    modules = Modules(program)
    makers: dict[tuple[int, str], set[str]] = {}  # (bytes, shape) -> modules that compute an array of this shape
    for size, shape, computation, name, i in sorted(set(_allocated_results(program)), reverse=True):
        makers.setdefault((size, shape), set()).add(modules.module_path(computation, name, i))
        if len(makers) > most:
            break
    # If a submodule of a loop's module computes an array, omit the loop's module, which only passes the array on.
    largest = [
        Buffer(where, size, shape)
        for (size, shape), paths in makers.items()
        for where in sorted(paths)
        if not any(other != where and other.startswith(where) for other in paths)
    ]
    return largest[:most]


def _allocated_results(program: Program) -> Iterator[tuple[int, str, str, str, int]]:
    """Yields (bytes, shape, computation, instruction, result index) for each array with its own main memory."""
    for computation in program.runs:
        if computation in program.fused:
            continue
        for instruction in program.computations[computation].values():
            if instruction.opcode in VIEWS or instruction.opcode.endswith(("-start", "-done")):
                continue
            for i, shape in enumerate(instruction.shapes):
                if shape.allocated:
                    yield shape.allocated, str(shape), computation, instruction.name, i
