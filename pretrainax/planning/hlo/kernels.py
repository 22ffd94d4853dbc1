"""Counts the bytes that each kernel of a compiled step reads and writes.

A kernel is an HLO instruction with all instructions that are fused into it. The module counts bytes of main memory. The
same bytes count once as read and once as written, because a second read comes from a cache.

- A kernel reads a whole operand, unless it only slices or gathers from the operand, possibly through fused
  instructions. In this case it reads only the slice.
- An update in place, by a dynamic-update-slice or a scatter, writes only the updated elements. A scatter also reads
  these elements, to add to them.
- A background copy (`copy-start`, `copy-done`) is one kernel, at the position of `copy-done`.
- A collective may continue within the fusions of other work, as on a TPU. It writes where it starts and reads where it
  ends. The fusions between pass the arrays of the collective on without moving them.
- Not counted: the workspace of a library call, which may stay unused; arrays in a TPU's VMEM; calls that only give a
  name to memory.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple, Optional

from pretrainax.planning.hlo.instructions import VIEWS, Instruction
from pretrainax.planning.hlo.program import Program

# Custom calls of the TPU compiler that move no bytes: allocation for a loop, a view of adjacent arrays, an assertion.
_NAMES_MEMORY = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")
_SLICES = ("slice", "dynamic-slice", "gather")
# Opcodes that read their whole operands, even if the kernel uses only a part of the result.
_NEEDS_ALL = ("broadcast", "dot", "convolution", "sort", "custom-call")
_PRODUCTS = frozenset(("dot", "convolution"))
ATTENTION = re.compile("splash|fmha")  # names of attention kernels on TPUs (splash) and of cuDNN (fmha)
_LIBRARY = re.compile(f"{ATTENTION.pattern}|gemm|matmul")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # -> index of the operand with the new elements
# Attribute of a TPU collective that overlaps with other work. It appears in all fusions that contain this work.
IN_FUSIONS = "async_collective_fusion_config"
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")  # output_to_operand_aliasing: result index, operand index


class Kernel(NamedTuple):
    """A kernel that a device launches once per run of a computation."""

    computation: str  # name of the computation that contains the instruction
    instruction: Instruction  # the instruction in the HLO text
    merged: (
        Instruction  # for a -done instruction, -start and -done as one instruction; otherwise equal to `instruction`
    )


class Update(NamedTuple):
    """An update in place of an argument of a fused computation."""

    name: str  # name of the updating instruction
    elements: int  # number of updated elements


def kernels_of(program: Program) -> Iterator[Kernel]:
    """Yields each kernel of a program once. A kernel runs as often as its computation (`program.runs`)."""
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
    opcode = "fusion" if opcode == "async" else opcode  # async operations call a computation, as a fusion does
    return dataclasses.replace(made, opcode=opcode, operands=start.operands, attributes=start.attributes)


def fused_instructions(program: Program, made: Instruction) -> Iterator[Instruction]:
    """Yields the instructions inside a fusion, including nested fusions; `instruction` itself if it is no fusion."""
    if made.opcode != "fusion":
        yield made
        return
    for one in program.computations[fused_by(made)].values():
        yield from fused_instructions(program, one)


def opcodes_of(program: Program, made: Instruction) -> set[str]:
    """Returns the opcodes of the instructions in a kernel.

    Instructions whose result has one element do not count, because most of them compute indices.
    """
    return {x.opcode for x in fused_instructions(program, made) if x.elements > 1}


def multiplies(made: Instruction, parts: set[str]) -> bool:
    """Returns True if a kernel computes matrix products, possibly in a library call or as attention.

    Args:
      made: the instruction of the kernel.
      parts: the opcodes in the kernel, from `opcodes_of`.
    """
    names = f"{made.target} {made.name} {made.op_name if made.opcode == 'custom-call' else ''}"
    return bool(parts & _PRODUCTS or _LIBRARY.search(names))


def reads(program: Program, kernel: Kernel) -> dict[str, int]:
    """Returns the bytes that one run of a kernel reads from each operand, {name of the operand: bytes}."""
    whole, values = kernel.merged, program.computations[kernel.computation]
    sizes: dict[str, int] = {}
    # If an update cannot be in place, the compiler has inserted a copy, which is a separate kernel.
    needed = _needed_of_operands(program, values, whole, whole.elements, is_in_place=True)
    passed_on = set(_passed_on(program, whole).values())
    for i, (name, elements) in enumerate(zip(whole.operands, needed, strict=True)):
        if elements and i not in passed_on:
            size = values[name].allocated * min(elements / values[name].elements, 1.0)
            sizes[name] = max(sizes.get(name, 0), round(size))
    return sizes


def writes(program: Program, kernel: Kernel) -> list[int]:
    """Returns the bytes that one run of a kernel writes to each array of its result."""
    whole, values = kernel.merged, program.computations[kernel.computation]
    parts: list[Optional[int]] = [None] * len(whole.shapes)  # updated elements; None: all
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
    for i in _passed_on(program, whole):
        sizes[i] = 0
    return sizes


def _passed_on(program: Program, made: Instruction) -> dict[int, int]:
    """Returns {index in the result: index of the operand} of arrays that a fusion passes on for a running collective.

    The result is {} if no collective overlaps with the fusion.
    """
    aliases = _ALIAS.findall(made.attributes.partition("output_to_operand_aliasing=")[2].partition("calls=")[0])
    if not (aliases and any(IN_FUSIONS in one.attributes for one in fused_instructions(program, made))):
        return {}
    return {int(result or 0): int(operand) for result, operand in aliases}


def updates(program: Program, computation: str) -> list[Optional[Update]]:
    """Returns the in-place update of each array in the result of a fused computation.

    An entry is None for an array that the computation writes as a whole.
    """
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
    """Returns the instruction that a chain of bitcasts starts from; `instruction` itself if it is not a bitcast."""
    while made.opcode == "bitcast":
        made = values[made.operands[0]]
    return made


def _has_workspace(made: Instruction) -> bool:
    """Returns True if the last array of the result is the workspace of a library call, as for cuBLAS and cuDNN."""
    last = made.shapes[-1] if made.shapes else None
    return made.opcode == "custom-call" and len(made.shapes) > 1 and last is not None and last.dtype in ("s8", "u8")


def fused_by(made: Instruction) -> str:
    """Returns the name of the computation that a fusion runs."""
    name = made.attribute("calls")
    assert name is not None, made
    return name


def _needed_of_values(program: Program, computation: str) -> dict[str, float]:
    """Returns how many elements of each value a fused computation needs for its result, {name of the value: number}."""
    values, root = program.computations[computation], program.root(computation)
    in_place = {update.name for update in updates(program, computation) if update}
    needed: dict[str, float] = collections.defaultdict(float, {root.name: float(root.elements)})
    for made in reversed(values.values()):  # values precede their uses
        if n := min(needed[made.name], made.elements):
            operand_elements = _needed_of_operands(program, values, made, n, made.name in in_place)
            for name, elements in zip(made.operands, operand_elements, strict=True):
                needed[name] += elements
    return needed


def _needed_of_operands(
    program: Program, values: dict[str, Instruction], made: Instruction, n: float, is_in_place: bool
) -> list[float]:
    """Returns how many elements of each operand an instruction needs to compute `n` elements of its result.

    Args:
      values: the instructions of the same computation, by name.
      is_in_place: True if an update writes into its operand, so that only the updated elements count.
    """
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
        needed = _needed_of_values(program, fused_by(made))
        parameters = [x for x in program.computations[fused_by(made)].values() if x.opcode == "parameter"]
        sizes = [needed[x.name] for x in sorted(parameters, key=lambda x: int(x.operands[0]))] or sizes
    return [share * size for size in sizes]
