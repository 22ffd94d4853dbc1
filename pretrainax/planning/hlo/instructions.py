"""The lines of HLO text: shapes and instructions."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple, Optional

_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")
# Opcodes of what has no memory of its own and takes no time: names for (parts of) others, and what runs other
# computations.
VIEWS = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all add-dependency opt-barrier "
    "partition-id replica-id".split()
)


class Shape(NamedTuple):
    """The type of one array of an instruction's result."""

    dtype: str
    dims: tuple[int, ...]
    layout: str  # "1,0:T(8,128)S(1)"

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def size(self) -> int:
        """Counts the bytes of its numbers."""
        return self.elements * _bits(self.dtype) // 8

    @property
    def allocated(self) -> int:
        """Counts bytes of main memory: whole tiles, as a TPU lays arrays; 0 in another memory, such as a TPU's VMEM."""
        if re.search(r"S\([1-9]", self.layout):
            return 0
        order, _, tiling = self.layout.partition(":")
        dims = [self.dims[int(i)] for i in order.split(",")] if order else list(self.dims)  # the minor ones first
        if tile := re.match(r"T\(([\d,]+)\)", tiling):
            for i, n in enumerate(reversed(tile[1].split(","))):
                if i < len(dims):
                    dims[i] = -(-dims[i] // int(n)) * int(n)
        return math.prod(dims) * _bits(self.dtype) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def _bits(dtype: str) -> int:
    """Returns the bits of a number: s4 -> 4, bf16 -> 16, f8e4m3fn -> 8; a token or an opaque value has none."""
    found = re.match(r"(?:pred|[a-z]+?(\d+))", dtype)
    return 0 if found is None else int(found[1] or 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of the result, tuples taken apart
    operands: tuple[str, ...]
    attributes: str  # all behind the operands
    is_root: bool

    @functools.cached_property
    def op_name(self) -> str:
        """Says where in the program it comes from, as JAX wrote it down."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @functools.cached_property
    def target(self) -> str:
        """Names the kernel or library that a custom call runs; empty where it is none."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def size(self) -> int:
        """Counts the bytes of its result."""
        return sum(shape.size for shape in self.shapes)

    @property
    def elements(self) -> int:
        """Counts the numbers of its result."""
        return sum(shape.elements for shape in self.shapes)

    @property
    def allocated(self) -> int:
        """Counts the bytes of main memory that its result takes."""
        return sum(shape.allocated for shape in self.shapes)

    def attribute(self, name: str) -> Optional[str]:
        """Returns what stands behind `name=`, up to the next comma; without the % of a computation."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def calls(self) -> list[str]:
        """Lists the computations that it runs; of a `while` without the condition."""
        if self.opcode.endswith(("-done", "-update")):  # of what -start began
            return []
        keys = "body|calls|true_computation|false_computation"
        if self.opcode == "call":  # of others, to_apply is how two numbers are added
            keys += "|to_apply"
        names = re.findall(rf"\b(?:{keys})=%([\w.\-]+)", self.attributes)
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        return names + (re.findall(r"%([\w.\-]+)", branches[1]) if branches else [])


def parse_instruction(line: str) -> Optional[Instruction]:
    """Reads `  ROOT %add.1 = f32[2]{0} add(%a, %b), metadata={…}`; None for a line that is no instruction."""
    left, equals, right = line.strip().partition(" = ")
    if not equals:
        return None
    end = _closing(right) if right.startswith("(") else right.index(" ")
    kind = re.match(r"\s*([\w\-]+)\(", right[end:])
    if kind is None:
        return None
    start = end + kind.end() - 1
    stop = start + _closing(right[start:])
    shapes = tuple(
        Shape(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n), layout)
        for dtype, dims, layout in _ARRAY.findall(right[:end])
    )
    inside = right[start + 1 : stop - 1]
    operands = re.findall(r"%([\w.\-]+)", inside) or [inside]  # a constant's value, a parameter's number
    name = left.removeprefix("ROOT ").removeprefix("%")
    return Instruction(name, kind[1], shapes, tuple(operands), right[stop:], left.startswith("ROOT "))


def _closing(text: str) -> int:
    """Finds where the bracket that `text` begins with is closed, and one more."""
    depth = 0
    for bracket in re.finditer(r"[()]", text):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.end()
    return len(text)
