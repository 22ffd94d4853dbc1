"""Counts what a kernel reads and writes: an instruction that does something, with all that is fused into it.

Counted are bytes of main memory, once each way: what a kernel reads twice comes from its cache the second time.

- An operand counts whole, but where it is only sliced or gathered, as what is taken of it, through what is fused in
  between too.
- An array that is updated in place, by a slice or a scatter, counts as what is written into it; a scatter reads that
  first, to add to it.
- What copies in the background (`copy-start`, `copy-done`) is one kernel, which stands where it ends.
- A collective that goes on within the fusions of other work, as a TPU's do, writes where it starts and reads where it
  ends; what those in between hand on is not moved there.
- Of a library's call the workspace is not counted, which it may use or not; nor are arrays in a TPU's VMEM, and calls
  that only name memory.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple, Optional

from pretrainax.planning.hlo.instructions import VIEWS, Instruction
from pretrainax.planning.hlo.program import Program

# Custom calls of a TPU's compiler that move nothing: space for a loop to fill, parts that lie side by side, a promise.
_NAMES_MEMORY = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")
_SLICES = ("slice", "dynamic-slice", "gather")
# Opcodes whose result needs the whole of each operand, however little is asked of it.
_NEEDS_ALL = ("broadcast", "dot", "convolution", "sort", "custom-call")
_PRODUCTS = frozenset(("dot", "convolution"))
ATTENTION = re.compile("splash|fmha")  # the kernels of a TPU, by their name, and of cuDNN
_LIBRARY = re.compile(f"{ATTENTION.pattern}|gemm|matmul")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # -> the operand that is written into the first
# A collective that a TPU overlaps with other work has this, and stands in the fusions of all of it.
IN_FUSIONS = "async_collective_fusion_config"
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")  # of output_to_operand_aliasing: a result, an operand


class Kernel(NamedTuple):
    """Names what a device starts once for each run of a computation."""

    computation: str
    made: Instruction  # as the text has it
    whole: Instruction  # of a pair that runs in the background one instruction, else the same


class Update(NamedTuple):
    """Describes what a fused computation writes into an array that it is given."""

    name: str  # of the instruction that does
    elements: int


def kernels_of(program: Program) -> Iterator[Kernel]:
    """Yields each kernel once; it runs as often as its computation (`program.runs`)."""
    for name in program.runs:
        if name in program.fused:
            continue
        for made in program.computations[name].values():
            is_view = made.opcode in VIEWS or made.opcode.endswith(("-start", "-update"))
            if not is_view and made.target not in _NAMES_MEMORY:
                yield Kernel(name, made, _with_its_start(program.computations[name], made))


def _with_its_start(values: dict[str, Instruction], made: Instruction) -> Instruction:
    start = made
    while start.opcode.endswith(("-done", "-update")):
        start = values[start.operands[0]]
    if start is made:
        return made
    opcode = made.opcode.removesuffix("-done")
    opcode = "fusion" if opcode == "async" else opcode  # of a computation that is named alike
    return dataclasses.replace(made, opcode=opcode, operands=start.operands, attributes=start.attributes)


def inside(program: Program, made: Instruction) -> Iterator[Instruction]:
    """Yields the instructions that a kernel is made of: what is fused into it, or itself."""
    if made.opcode != "fusion":
        yield made
        return
    for one in program.computations[fused_by(made)].values():
        yield from inside(program, one)


def parts_of(program: Program, made: Instruction) -> set[str]:
    """Returns the opcodes that a kernel is made of, without arithmetic of places."""
    return {x.opcode for x in inside(program, made) if x.elements > 1}


def multiplies(made: Instruction, parts: set[str]) -> bool:
    """Returns True if a kernel makes products of matrices; parts: of `parts_of`."""
    names = f"{made.target} {made.name} {made.op_name if made.opcode == 'custom-call' else ''}"
    return bool(parts & _PRODUCTS or _LIBRARY.search(names))


def reads(program: Program, kernel: Kernel) -> dict[str, int]:
    """Counts the bytes that a kernel reads of each of its operands, by name."""
    whole, values = kernel.whole, program.computations[kernel.computation]
    found: dict[str, int] = {}
    taken = _taken(program, values, whole, whole.elements, is_in_place=True)  # or the compiler has made a copy of it
    handed_on = set(_handed_on(program, whole).values())
    for i, (name, elements) in enumerate(zip(whole.operands, taken, strict=True)):
        if elements and i not in handed_on:
            size = values[name].allocated * min(elements / values[name].elements, 1.0)
            found[name] = max(found.get(name, 0), round(size))
    return found


def writes(program: Program, kernel: Kernel) -> list[int]:
    """Counts the bytes that a kernel writes of each array of its result."""
    whole, values = kernel.whole, program.computations[kernel.computation]
    parts: list[Optional[int]] = [None] * len(whole.shapes)  # elements of those that are updated in place
    if whole.opcode == "fusion":
        parts = [update and update.elements for update in updates(program, fused_by(whole))]
    elif whole.opcode in UPDATES:
        parts = [values[whole.operands[UPDATES[whole.opcode]]].elements]
    elif _has_workspace(whole):
        parts[-1] = 0
    sizes = [shape.allocated for shape in whole.shapes]
    for i, (shape, part) in enumerate(zip(whole.shapes, parts, strict=True)):
        if part is not None:
            sizes[i] = round(sizes[i] * min(part / max(shape.elements, 1), 1.0))
    for i in _handed_on(program, whole):
        sizes[i] = 0
    return sizes


def _handed_on(program: Program, made: Instruction) -> dict[int, int]:
    """Finds results of a fusion that are its operands, of a collective that goes on behind it: {result: operand}."""
    aliases = _ALIAS.findall(made.attributes.partition("output_to_operand_aliasing=")[2].partition("calls=")[0])
    if not (aliases and any(IN_FUSIONS in one.attributes for one in inside(program, made))):
        return {}
    return {int(result or 0): int(operand) for result, operand in aliases}


def updates(program: Program, computation: str) -> list[Optional[Update]]:
    """Finds, for each array of a fused computation's result, what updates it in place; None: it is written whole."""
    values = program.computations[computation]
    return [_update(program, values, values[name]) for name in program.makers(computation)]


def _update(program: Program, values: dict[str, Instruction], made: Instruction) -> Optional[Update]:
    made = behind_bitcasts(values, made)
    if made.opcode == "fusion" and len(made.shapes) == 1:
        return updates(program, fused_by(made))[0]
    if made.opcode in UPDATES and behind_bitcasts(values, values[made.operands[0]]).opcode == "parameter":
        return Update(made.name, values[made.operands[UPDATES[made.opcode]]].elements)
    return None


def behind_bitcasts(values: dict[str, Instruction], made: Instruction) -> Instruction:
    """Returns what a value is another name of."""
    while made.opcode == "bitcast":
        made = values[made.operands[0]]
    return made


def _has_workspace(made: Instruction) -> bool:
    """Returns True if the last array of the result is bytes to work in, as of cuBLAS, cuDNN and their like."""
    last = made.shapes[-1] if made.shapes else None
    return made.opcode == "custom-call" and len(made.shapes) > 1 and last is not None and last.dtype in ("s8", "u8")


def fused_by(made: Instruction) -> str:
    """Names the computation that a fusion runs."""
    name = made.attribute("calls")
    assert name is not None, made
    return name


def _needed(program: Program, computation: str) -> dict[str, float]:
    """Counts the elements of each value of a fused computation that its result is made of."""
    values, root = program.computations[computation], program.root(computation)
    in_place = {update.name for update in updates(program, computation) if update}
    needed: dict[str, float] = collections.defaultdict(float, {root.name: float(root.elements)})
    for made in reversed(values.values()):  # each stands before what is made of it
        if n := min(needed[made.name], made.elements):
            taken = _taken(program, values, made, n, made.name in in_place)
            for name, elements in zip(made.operands, taken, strict=True):
                needed[name] += elements
    return needed


def _taken(
    program: Program, values: dict[str, Instruction], made: Instruction, n: float, is_in_place: bool
) -> list[float]:
    """Counts the elements of each operand that `n` elements of an instruction's result are made of."""
    sizes = [values[name].elements if name in values else 0 for name in made.operands]
    if made.opcode in _SLICES:
        return [n, *sizes[1:]]
    if made.opcode in UPDATES and is_in_place:
        before = sizes[UPDATES[made.opcode]] if made.opcode == "scatter" else 0
        return [before, *sizes[1:]]
    if made.opcode in _NEEDS_ALL:
        return [float(size) for size in sizes]
    share = n / max(made.elements, 1)
    if made.opcode == "fusion":
        needed = _needed(program, fused_by(made))
        parameters = [x for x in program.computations[fused_by(made)].values() if x.opcode == "parameter"]
        sizes = [needed[x.name] for x in sorted(parameters, key=lambda x: int(x.operands[0]))] or sizes
    return [share * size for size in sizes]
