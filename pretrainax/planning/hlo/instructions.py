"""Parses the lines of HLO text into shapes and instructions."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple, Optional

_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")
# Opcodes that take neither memory nor time themselves: views of other values, and instructions that call other
# computations.
VIEWS = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all add-dependency opt-barrier "
    "partition-id replica-id".split()
)


class Shape(NamedTuple):
    """The dtype, the dimensions and the memory layout of one array in the result of an instruction."""

    dtype: str
    dims: tuple[int, ...]
    layout: str  # "1,0:T(8,128)S(1)"

    @property
    def elements(self) -> int:
        """Returns the number of elements of the array."""
        return math.prod(self.dims)

    @property
    def size(self) -> int:
        """Returns the size of the array in bytes, without padding."""
        return self.elements * _bits(self.dtype) // 8

    @property
    def allocated(self) -> int:
        """Computes the bytes that the array occupies in main memory, including the padding to TPU tiles.

        Returns 0 for an array outside main memory, for example in a TPU's VMEM.
        """
        if re.search(r"S\([1-9]", self.layout):
            return 0
        order, _, tiling = self.layout.partition(":")
        dims = [self.dims[int(i)] for i in order.split(",")] if order else list(self.dims)  # minor dimensions first
        if tile := re.match(r"T\(([\d,]+)\)", tiling):
            for i, n in enumerate(reversed(tile[1].split(","))):
                if i < len(dims):
                    dims[i] = -(-dims[i] // int(n)) * int(n)
        return math.prod(dims) * _bits(self.dtype) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def _bits(dtype: str) -> int:
    """Parses a dtype's bits per element: s4 -> 4, bf16 -> 16, f8e4m3fn -> 8. Returns 0 for token and opaque types."""
    match = re.match(r"(?:pred|[a-z]+?(\d+))", dtype)
    return 0 if match is None else int(match[1] or 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One HLO instruction: one line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # the arrays of the result; nested tuples are flattened
    operands: tuple[str, ...]  # names of instructions; for a constant its value, for a parameter its number
    attributes: str  # the text after the operands
    is_root: bool  # whether the result of this instruction is the result of the computation

    @functools.cached_property
    def op_name(self) -> str:
        """Returns the instruction's JAX name stack, such as "jit(step)/decoder/dot_general", or "" if it has none."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @functools.cached_property
    def target(self) -> str:
        """Returns the target of a custom call (the name of a kernel or library), or "" for any other instruction."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def size(self) -> int:
        """Returns the total size in bytes of the result's arrays, without padding."""
        return sum(shape.size for shape in self.shapes)

    @property
    def elements(self) -> int:
        """Returns the total number of elements of the result's arrays."""
        return sum(shape.elements for shape in self.shapes)

    @property
    def allocated(self) -> int:
        """Returns the bytes that the result occupies in main memory, with padding."""
        return sum(shape.allocated for shape in self.shapes)

    def attribute(self, name: str) -> Optional[str]:
        """Parses the value of the attribute `name=VALUE`, without a leading %. Returns None if it is missing."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else None

    @property
    def calls(self) -> list[str]:
        """Returns the names of the computations that the instruction executes.

        The condition of a `while` and the functions of reductions are not included.
        """
        if self.opcode.endswith(("-done", "-update")):  # the matching -start instruction has the call
            return []
        keys = "body|calls|true_computation|false_computation"
        if self.opcode == "call":  # for other opcodes, to_apply is a reduction function
            keys += "|to_apply"
        names = re.findall(rf"\b(?:{keys})=%([\w.\-]+)", self.attributes)
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        return names + (re.findall(r"%([\w.\-]+)", branches[1]) if branches else [])


def parse_instruction(line: str) -> Optional[Instruction]:
    """Parses a line of HLO text; returns None if the line has no instruction.

    Example of a line: `  ROOT %add.1 = f32[2]{0} add(%a, %b), metadata={…}`.
    """
    lhs, equals, rhs = line.strip().partition(" = ")
    if not equals:
        return None
    shapes_end = _closing_index(rhs) if rhs.startswith("(") else rhs.index(" ")
    opcode = re.match(r"\s*([\w\-]+)\(", rhs[shapes_end:])
    if opcode is None:
        return None
    operands_start = shapes_end + opcode.end() - 1
    operands_end = operands_start + _closing_index(rhs[operands_start:])
    shapes = tuple(
        Shape(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n), layout)
        for dtype, dims, layout in _ARRAY.findall(rhs[:shapes_end])
    )
    operand_text = rhs[operands_start + 1 : operands_end - 1]
    operands = re.findall(r"%([\w.\-]+)", operand_text) or [operand_text]  # a constant's value, a parameter's number
    name = lhs.removeprefix("ROOT ").removeprefix("%")
    return Instruction(name, opcode[1], shapes, tuple(operands), rhs[operands_end:], lhs.startswith("ROOT "))


def _closing_index(text: str) -> int:
    """Returns the index after the parenthesis that closes the first one in `text`, or the length if none does."""
    depth = 0
    for bracket in re.finditer(r"[()]", text):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.end()
    return len(text)
