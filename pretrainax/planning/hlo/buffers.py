"""Finds the largest arrays that a compiled step allocates."""

from collections.abc import Iterator
from typing import NamedTuple

from pretrainax.planning.hlo.instructions import VIEWS
from pretrainax.planning.hlo.modules import Modules
from pretrainax.planning.hlo.program import Program


class Buffer(NamedTuple):
    """An array in a device's main memory."""

    where: str  # the module that computes it
    bytes: int  # with the padding of its layout
    shape: str  # "bf16[8,512,512]"


def buffers_of(program: Program, most: int = 20) -> list[Buffer]:
    """Returns the largest arrays that a step computes, each shape of a module once. They are not all live at once."""
    modules = Modules(program)
    makers: dict[tuple[int, str], set[str]] = {}  # modules of each size and shape
    for size, shape, computation, name, i in sorted(set(_results(program)), reverse=True):
        makers.setdefault((size, shape), set()).add(modules.of(computation, name, i))
        if len(makers) > most:
            break
    # If a module inside a loop computes an array, drop the loop itself, which only carries the array.
    largest = [
        Buffer(where, size, shape)
        for (size, shape), paths in makers.items()
        for where in sorted(paths)
        if not any(other != where and other.startswith(where) for other in paths)
    ]
    return largest[:most]


def _results(program: Program) -> Iterator[tuple[int, str, str, str, int]]:
    """Yields (bytes, shape, computation, instruction, index) of each array with its own memory."""
    for computation in program.runs:
        if computation in program.fused:
            continue
        for instruction in program.computations[computation].values():
            if instruction.opcode in VIEWS or instruction.opcode.endswith(("-start", "-done")):
                continue
            for i, shape in enumerate(instruction.shapes):
                if shape.allocated:
                    yield shape.allocated, str(shape), computation, instruction.name, i
