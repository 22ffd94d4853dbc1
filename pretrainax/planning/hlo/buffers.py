"""The large arrays that a compiled step makes."""

from collections.abc import Iterator
from typing import NamedTuple

from pretrainax.planning.hlo.instructions import VIEWS
from pretrainax.planning.hlo.modules import Modules
from pretrainax.planning.hlo.program import Program


class Buffer(NamedTuple):
    """An array in a device's main memory."""

    where: str  # the module that makes it
    bytes: int  # with the padding of its layout
    shape: str  # "bf16[8,512,512]"


def buffers_of(program: Program, most: int = 20) -> list[Buffer]:
    """Returns the largest arrays that a step itself makes, each shape of a module once; not all live at one time."""
    modules = Modules(program)
    makers: dict[tuple[int, str], set[str]] = {}  # modules of each size and shape
    for size, shape, computation, name, i in sorted(set(_results(program)), reverse=True):
        makers.setdefault((size, shape), set()).add(modules.of(computation, name, i))
        if len(makers) > most:
            break
    # The loop that carries an array is no maker of it, where a module inside of it is.
    largest = [
        Buffer(where, size, shape)
        for (size, shape), every in makers.items()
        for where in sorted(every)
        if not any(other != where and other.startswith(where) for other in every)
    ]
    return largest[:most]


def _results(program: Program) -> Iterator[tuple[int, str, str, str, int]]:
    """Yields (bytes, shape, computation, instruction, index) of each array that takes memory of its own."""
    for computation in program.runs:
        if computation in program.fused:
            continue
        for made in program.computations[computation].values():
            if made.opcode in VIEWS or made.opcode.endswith(("-start", "-done")):
                continue
            for i, shape in enumerate(made.shapes):
                if shape.allocated:
                    yield shape.allocated, str(shape), computation, made.name, i
