"""Counts the bytes that each kernel of a compiled step reads and writes.

A kernel is an HLO instruction with all instructions that are fused into it. The module counts accesses to main memory.
Bytes that a kernel reads several times count once, because all reads after the first come from a cache.

- A kernel reads a whole operand, unless it only slices or gathers from the operand, possibly through fused
  instructions. In this case it reads only the slice.
- An in-place update, by a dynamic-update-slice or a scatter, writes only the updated elements. A scatter also reads
  these elements, to add to them.
- A background copy (`copy-start`, `copy-done`) is one kernel, at the position of `copy-done`.
- A collective may run inside fusions that also contain other work, for example on a TPU. Its writes count where it
  starts, and its reads where it ends. The fusions in between pass on the collective's arrays without moving them.
- Not counted: the workspace of a library call, which may stay unused; arrays in a TPU's VMEM; custom calls that only
  allocate or alias memory.
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
# Opcodes that read their whole operands, even if the kernel uses only some elements of the result.
_NEEDS_ALL = ("broadcast", "dot", "convolution", "sort", "custom-call")
_PRODUCTS = frozenset(("dot", "convolution"))
ATTENTION = re.compile("splash|fmha|tiled_attention")  # in names of attention kernels: TPU, cuDNN, and ours
_LIBRARY = re.compile(f"{ATTENTION.pattern}|gemm|matmul")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # opcode -> index of the operand with the new elements
# Attribute of a TPU collective that overlaps with other work. All fusions that contain this work have the attribute.
IN_FUSIONS = "async_collective_fusion_config"
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")  # output_to_operand_aliasing: result index, operand index


class Kernel(NamedTuple):
    """A kernel, which a device launches once each time it executes the computation that contains the kernel."""

    computation: str  # name of the computation that contains the instruction
    instruction: Instruction  # the instruction in the HLO text
    merged: (
        Instruction  # for a -done instruction, -start and -done as one instruction; otherwise equal to `instruction`
    )


class Update(NamedTuple):
    """An in-place update of an argument of a fused computation."""

    name: str  # name of the updating instruction
    elements: int  # number of updated elements


def kernels_of(program: Program) -> Iterator[Kernel]:
    """Yields each kernel of a program once. A kernel runs as often as its computation (`program.runs`)."""
    for name in program.runs:
        if name in program.fused:
            continue
        for instruction in program.computations[name].values():
            is_view = instruction.opcode in VIEWS or instruction.opcode.endswith(("-start", "-update"))
            if not is_view and instruction.target not in _NAMES_MEMORY:
                yield Kernel(name, instruction, _merge_start(program.computations[name], instruction))


def _merge_start(values: dict[str, Instruction], done: Instruction) -> Instruction:
    """Merges a -done instruction with its -start instruction; returns any other instruction unchanged.

    Args:
      values: the instructions of the same computation, by name.
    """
    start = done
    while start.opcode.endswith(("-done", "-update")):
        start = values[start.operands[0]]
    if start is done:
        return done
    opcode = done.opcode.removesuffix("-done")
    opcode = "fusion" if opcode == "async" else opcode  # async operations call a computation, as a fusion does
    return dataclasses.replace(done, opcode=opcode, operands=start.operands, attributes=start.attributes)


def fused_instructions(program: Program, made: Instruction) -> Iterator[Instruction]:
    """Yields the instructions inside a fusion, including nested fusions; yields `made` itself if it is not a fusion."""
    if made.opcode != "fusion":
        yield made
        return
    for fused in program.computations[fused_by(made)].values():
        yield from fused_instructions(program, fused)


def opcodes_of(program: Program, made: Instruction) -> set[str]:
    """Returns the opcodes of the instructions in a kernel.

    Instructions whose result has a single element do not count, because most of them compute indices.
    """
    return {x.opcode for x in fused_instructions(program, made) if x.elements > 1}


def multiplies(made: Instruction, parts: set[str]) -> bool:
    """Checks whether a kernel computes matrix multiplications, possibly in a library call or as attention.

    Args:
      made: the instruction of the kernel.
      parts: the opcodes in the kernel, from `opcodes_of`.
    """
    names = f"{made.target} {made.name} {made.op_name if made.opcode == 'custom-call' else ''}"
    return bool(parts & _PRODUCTS or _LIBRARY.search(names))


def reads(program: Program, kernel: Kernel) -> dict[str, int]:
    """Computes the bytes that one execution of a kernel reads from each operand, by operand name."""
    merged, values = kernel.merged, program.computations[kernel.computation]
    bytes_by_operand: dict[str, int] = {}
    # All updates are in place: where an update cannot be in place, the compiler has inserted a copy, a separate kernel.
    needed_elements = _needed_operand_elements(program, values, merged, merged.elements, is_in_place=True)
    passed_on_operands = set(_passed_on_arrays(program, merged).values())
    for i, (name, elements) in enumerate(zip(merged.operands, needed_elements, strict=True)):
        if elements and i not in passed_on_operands:
            size = values[name].allocated * min(elements / values[name].elements, 1.0)
            bytes_by_operand[name] = max(bytes_by_operand.get(name, 0), round(size))
    return bytes_by_operand


def writes(program: Program, kernel: Kernel) -> list[int]:
    """Computes the bytes that one execution of a kernel writes to each array of its result."""
    merged, values = kernel.merged, program.computations[kernel.computation]
    updated_elements: list[Optional[int]] = [None] * len(merged.shapes)  # updated elements; None: all
    if merged.opcode == "fusion":
        updated_elements = [update and update.elements for update in updates(program, fused_by(merged))]
    elif merged.opcode in UPDATES:
        updated_elements = [values[merged.operands[UPDATES[merged.opcode]]].elements]
    elif _has_workspace(merged):
        updated_elements[-1] = 0
    sizes = [shape.allocated for shape in merged.shapes]
    for i, (shape, updated) in enumerate(zip(merged.shapes, updated_elements, strict=True)):
        if updated is not None:
            sizes[i] = round(sizes[i] * min(updated / max(shape.elements, 1), 1.0))
    for i in _passed_on_arrays(program, merged):
        sizes[i] = 0
    return sizes


def _passed_on_arrays(program: Program, instruction: Instruction) -> dict[int, int]:
    """Returns the arrays of an ongoing collective that a fusion passes on unchanged.

    The result maps the index of each such array in the fusion's result to the index of the operand. It is {} if no
    collective overlaps with the fusion.
    """
    aliases = _ALIAS.findall(instruction.attributes.partition("output_to_operand_aliasing=")[2].partition("calls=")[0])
    if not (aliases and any(IN_FUSIONS in fused.attributes for fused in fused_instructions(program, instruction))):
        return {}
    return {int(result or 0): int(operand) for result, operand in aliases}


def updates(program: Program, computation: str) -> list[Optional[Update]]:
    """Finds, for each array in the result of a fused computation, the in-place update that produces the array.

    The entry is None for an array that the computation writes as a whole.
    """
    values = program.computations[computation]
    return [_update(program, values, values[name]) for name in program.result_instructions(computation)]


def _update(program: Program, values: dict[str, Instruction], made: Instruction) -> Optional[Update]:
    """Returns the in-place update that one fused instruction makes, or None if it writes its whole result."""
    made = behind_bitcasts(values, made)
    if made.opcode == "fusion" and len(made.shapes) == 1:
        return updates(program, fused_by(made))[0]
    if made.opcode in UPDATES and behind_bitcasts(values, values[made.operands[0]]).opcode == "parameter":
        return Update(made.name, values[made.operands[UPDATES[made.opcode]]].elements)
    return None


def behind_bitcasts(values: dict[str, Instruction], made: Instruction) -> Instruction:
    """Follows bitcasts back from `made` to the first instruction that is not a bitcast, possibly `made` itself."""
    while made.opcode == "bitcast":
        made = values[made.operands[0]]
    return made


def _has_workspace(instruction: Instruction) -> bool:
    """Checks whether the last array of the result is the workspace of a library call, as for cuBLAS and cuDNN."""
    last = instruction.shapes[-1] if instruction.shapes else None
    return (
        instruction.opcode == "custom-call"
        and len(instruction.shapes) > 1
        and last is not None
        and last.dtype in ("s8", "u8")
    )


def fused_by(made: Instruction) -> str:
    """Returns the name of the computation that a fusion executes."""
    name = made.attribute("calls")
    assert name is not None, made
    return name


def _needed_elements(program: Program, computation: str) -> dict[str, float]:
    """Computes how many elements of each value are needed for the result of a fused computation, by value name."""
    values, root = program.computations[computation], program.root(computation)
    in_place = {update.name for update in updates(program, computation) if update}
    needed: dict[str, float] = collections.defaultdict(float, {root.name: float(root.elements)})
    for instruction in reversed(values.values()):  # values precede their uses
        if num_elements := min(needed[instruction.name], instruction.elements):
            operand_elements = _needed_operand_elements(
                program, values, instruction, num_elements, instruction.name in in_place
            )
            for name, elements in zip(instruction.operands, operand_elements, strict=True):
                needed[name] += elements
    return needed


def _needed_operand_elements(
    program: Program, values: dict[str, Instruction], instruction: Instruction, n: float, is_in_place: bool
) -> list[float]:
    """Computes how many elements of each operand an instruction needs to compute `n` elements of its result.

    Args:
      values: the instructions of the same computation, by name.
      is_in_place: whether an update writes into its operand, so that only the updated elements count.
    """
    sizes = [values[name].elements if name in values else 0 for name in instruction.operands]
    if instruction.opcode in _SLICES:
        return [n, *sizes[1:]]
    if instruction.opcode in UPDATES and is_in_place:
        scatter_reads = sizes[UPDATES[instruction.opcode]] if instruction.opcode == "scatter" else 0
        return [scatter_reads, *sizes[1:]]
    if instruction.opcode in _NEEDS_ALL:
        return [float(size) for size in sizes]
    fraction = n / max(instruction.elements, 1)
    if instruction.opcode == "fusion":
        needed = _needed_elements(program, fused_by(instruction))
        parameters = [x for x in program.computations[fused_by(instruction)].values() if x.opcode == "parameter"]
        sizes = [needed[x.name] for x in sorted(parameters, key=lambda x: int(x.operands[0]))] or sizes
    return [fraction * size for size in sizes]
