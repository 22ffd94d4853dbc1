"""Reads compiled HLO text: how often each instruction runs, what devices send each other, which buffers are large.

The text is that of `compiled.as_text()`, after all passes and as one device runs it, so that what is counted is what
was made of the program, not what was asked for.
"""

import collections
import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator
from typing import NamedTuple, Optional

import numpy as np
from jax.sharding import Mesh

from pretrainax.planning.traffic import Collective

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# What holds no buffer of its own: names for parts of others, and ends of what another instruction began.
_NO_BUFFER = "parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id".split()
_TRANSPARENT = ("bitcast", "copy", "convert", "reshape", "transpose", "get-tuple-element", "copy-done")
# Parts of an op_name that are how JAX came there, not where in the model.
_PATH_NOISE = re.compile(
    r".*[^a-z0-9_].*|while|body|cond|closed_call|checkpoint|remat\d*|rematted_computation|custom_[jv]\w+_call\w*"
    r"|branch_\d+_fun|shard_map|pjit|core_call|scan|vmap|pallas_call"
)


class Shape(NamedTuple):
    """Of one array of an instruction's result."""

    dtype: str
    dims: tuple[int, ...]
    layout: str  # "1,0:T(8,128)S(1)"

    @property
    def size(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.dims) * _bits(self.dtype) // 8

    @property
    def allocated(self) -> int:
        """Bytes of main memory: whole tiles, as a TPU lays arrays; 0 in another memory, such as a TPU's VMEM."""
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
    """s4 -> 4, bf16 -> 16, f8e4m3fn -> 8; a token or an opaque value has none."""
    found = re.match(r"(?:pred|[a-z]+?(\d+))", dtype)
    return 0 if found is None else int(found[1] or 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of the result, tuples taken apart
    operands: tuple[str, ...]
    attributes: str  # all behind the operands
    is_root: bool

    @functools.cached_property
    def op_name(self) -> str:
        """Where in the program it comes from, as JAX wrote it down."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def size(self) -> int:
        return sum(shape.size for shape in self.shapes)

    def attribute(self, name: str) -> Optional[str]:
        """What stands behind `name=`, up to the next comma; without the % of a computation."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def calls(self) -> list[str]:
        """Computations that it runs; of a `while` without the condition."""
        if self.opcode.endswith(("-done", "-update")):  # of what -start began
            return []
        run = r"\b(?:body|calls|true_computation|false_computation%s)=%%([\w.\-]+)"  # else to_apply adds two numbers
        names = re.findall(run % ("|to_apply" if self.opcode == "call" else ""), self.attributes)
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        return names + (re.findall(r"%([\w.\-]+)", branches[1]) if branches else [])


class Buffer(NamedTuple):
    """An array in a device's main memory."""

    where: str  # the module that makes it
    bytes: int  # with the padding of its layout
    shape: str  # "bf16[8,512,512]"


class Program:
    """A parsed HLO module."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self._modules: dict[tuple[str, str, int], str] = {}  # of results, as they are asked for
        self.entry = ""
        for line in text.splitlines():
            if header := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
                current = self.computations[header[2]] = {}
                self.entry = header[2] if header[1] else self.entry
            elif line.startswith("  ") and (found := _instruction(line)):
                current[found.name] = found

    def root(self, computation: str) -> Instruction:
        return next(x for x in self.computations[computation].values() if x.is_root)

    @functools.cached_property
    def runs(self) -> dict[str, int]:
        """How often a step runs each computation; every branch of a conditional counts."""
        runs: collections.Counter = collections.Counter()

        def visit(name: str, times: int) -> None:
            runs[name] += times
            for instruction in self.computations[name].values():
                trips = self.trip_count(name, instruction) if instruction.opcode == "while" else 1
                for called in instruction.calls:
                    visit(called, times * trips)

        visit(self.entry, 1)
        return dict(runs)

    def trip_count(self, computation: str, loop: Instruction) -> int:
        """Turns of a `while`: as the compiler wrote it down, or from a counter that goes up to a constant; else 1."""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        condition, body = loop.attribute("condition"), loop.attribute("body")
        compare = self.root(condition)
        if compare.opcode != "compare" or compare.attribute("direction") != "LT":
            return 1
        counter, limit = (self.computations[condition][name] for name in compare.operands)
        if counter.opcode != "get-tuple-element" or limit.opcode != "constant":
            return 1
        index = int(counter.attribute("index"))
        start = self._constant(computation, loop.operands[0], index)
        step = self._added(body, self.root(body).operands[index])
        return max(-(-(_value(limit) - start) // step), 0)

    def _constant(self, computation: str, operand: str, index: int) -> int:
        """Element `index` of the tuple that a loop begins with; 0 where it is no constant."""
        instructions = self.computations[computation]
        made = instructions[operand]
        if made.opcode != "tuple":
            return 0
        made = instructions[made.operands[index]]
        while made.opcode in _TRANSPARENT[:-2]:
            made = instructions[made.operands[0]]
        return _value(made) if made.opcode == "constant" else 0

    def _added(self, body: str, name: str) -> int:
        """What one turn adds to a counter; 1 where that cannot be read."""
        instructions, added = self.computations[body], 0
        while (made := instructions[name]).opcode == "add":
            constants = [x for x in made.operands if instructions[x].opcode == "constant"]
            others = [x for x in made.operands if x not in constants]
            if len(others) != 1:
                return 1
            added, name = added + sum(_value(instructions[x]) for x in constants), others[0]
        return max(added, 1)

    # --- what devices send ---------------------------------------------------------------------------------------

    def collectives(self, mesh: Mesh) -> list[Collective]:
        """All of a step, those that move most bytes first.

        Where the compiler made a loop of permutes of a gather and the product behind it, or of a product and the
        scattered sum of it, these count as what they are made of. Groups are device numbers in the order of `mesh`.
        """
        found: dict[str, tuple[int, Instruction, str]] = {}
        for name, times in self.runs.items():
            for instruction in self.computations[name].values():
                if instruction.opcode.removesuffix("-start") in _KINDS:
                    key = f"{name}/{instruction.name}"
                    if "async_collective_fusion_config" in instruction.attributes:
                        # One that a TPU overlaps with other work stands in the fusions of all of it.
                        key = f"{instruction.attribute('channel_id')} {instruction.op_name}"
                    if key not in found or times < found[key][0]:
                        found[key] = times, instruction, name
        total: collections.Counter = collections.Counter()
        for times, instruction, name in found.values():
            operands = [self.computations[name][x] for x in instruction.operands]
            where = module_of(instruction.op_name) or self._common_module(name, instruction)
            if one := _collective(instruction, name, sum(x.size for x in operands), where, mesh):
                total[one] += times
        counted = [dataclasses.replace(one, count=times) for one, times in total.items() if times]
        return sorted(counted, key=lambda one: -one.total)

    def _common_module(self, computation: str, made: Instruction) -> str:
        """What the modules of all operands begin with, else the first: the compiler joins collectives that it can run
        as one, and gives some of what it adds no name."""
        modules = (self._module(computation, x) for x in made.operands if x in self.computations[computation])
        paths = [module.split("/") for module in modules if module]
        return "/".join(os.path.commonprefix(paths) or next(iter(paths), []))

    # --- memory --------------------------------------------------------------------------------------------------

    def buffers(self, most: int = 20) -> list[Buffer]:
        """The largest arrays that the step itself makes, each shape of a module once; not all live at one time."""
        found = set()
        for name in self.runs:
            if name not in self._fused:
                for made in self.computations[name].values():
                    if made.opcode not in _NO_BUFFER and not made.opcode.endswith(("-start", "-done")):
                        for i, shape in enumerate(made.shapes):
                            if shape.allocated:
                                found.add((shape.allocated, str(shape), name, made.name, i))
        modules: dict[tuple[int, str], set[str]] = {}  # of each size and shape
        for size, shape, name, made, i in sorted(found, reverse=True):
            modules.setdefault((size, shape), set()).add(self._module(name, made, i))
            if len(modules) > most:
                break
        # The loop that carries an array is no maker of it, where a module inside of it is.
        largest = [
            Buffer(where, size, shape)
            for (size, shape), every in modules.items()
            for where in sorted(every)
            if not any(other != where and other.startswith(where) for other in every)
        ]
        return largest[:most]

    @functools.cached_property
    def _fused(self) -> set[str]:
        """Computations whose values never leave the device's registers, but for the result."""
        every = (x for instructions in self.computations.values() for x in instructions.values())
        return {name for x in every if x.opcode not in ("while", "conditional", "call") for name in x.calls}

    def _module(self, computation: str, name: str, index: int = 0) -> str:
        """The module that wrote a result; of one that is written into a larger array, whose part it is."""
        key = computation, name, index
        if key not in self._modules:
            self._modules[key] = self._find_module(*key)
        return self._modules[key]

    def _find_module(self, computation: str, name: str, index: int) -> str:
        instructions = self.computations[computation]
        made = instructions[name]
        if made.opcode == "fusion":
            inside = made.attribute("calls")
            root = self.root(inside)
            chosen = root.operands[index] if root.opcode == "tuple" else root.name
            return self._module(inside, chosen) or module_of(made.op_name) or self._common_module(computation, made)
        if made.opcode == "parameter" and (call := self._callers.get(computation)):
            outer, fusion = call
            return self._module(outer, fusion.operands[int(made.operands[0])])
        written, own = made.opcode == "dynamic-update-slice", module_of(made.op_name)
        if written or made.opcode in _TRANSPARENT:
            part = made.operands[1 if written else 0]
            number = int(made.attribute("index") or 0) if made.opcode == "get-tuple-element" else 0
            found = self._module(computation, part, number) if part in instructions else ""
            return found if found.startswith(own) else own
        return own or self._common_module(computation, made)

    @functools.cached_property
    def _callers(self) -> dict[str, tuple[str, Instruction]]:
        """The computation and the fusion that each fused computation is run by."""
        return {
            made.attribute("calls"): (name, made)
            for name, instructions in self.computations.items()
            for made in instructions.values()
            if made.opcode == "fusion"
        }


def module_of(op_name: str) -> str:
    """`jit(step)/transpose(jvp(T))/encoder/while/body/closed_call/blocks/mlp/up/dot_general` -> encoder/blocks/mlp/up.

    Of an argument of the step its path, `state.params['encoder']['blocks']` -> state/params/encoder/blocks. Empty
    outside of the model.
    """
    if op_name.startswith(("state.", "batch[")):
        return "/".join(re.findall(r"\w+", op_name))
    parts = (re.sub(r"^(?:transpose\(|jvp\(|vmap\()+([^()]*)\)+$", r"\1", part) for part in op_name.split("/")[:-1])
    return "/".join(part for part in parts if part and not _PATH_NOISE.fullmatch(part))


_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")


def _instruction(line: str) -> Optional[Instruction]:
    """`  ROOT %add.1 = f32[2]{0} add(%a, %b), metadata={…}`"""
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
    """Where the bracket that `text` begins with is closed, and one more."""
    depth = 0
    for bracket in re.finditer(r"[()]", text):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.end()
    return len(text)


def _value(constant: Instruction) -> int:
    return int(constant.operands[0])


def _collective(made: Instruction, computation: str, size: int, where: str, mesh: Mesh) -> Optional[Collective]:
    """One run of it; None where nothing leaves a device. size: bytes of its operands."""
    kind = made.opcode.removesuffix("-start")
    if kind == "collective-permute":
        groups = np.array(re.findall(r"\{(\d+),(\d+)\}", made.attributes), int).reshape(-1, 2)
        sent = size
        if window := re.search(r"windowed_dot_general_body_(ag|rs)", computation):
            kind = {"ag": "all-gather", "rs": "reduce-scatter"}[window[1]]
    else:
        groups = replica_groups(made.attributes, mesh.size)
        n = groups.shape[1]
        if kind == "all-reduce" and "all-reduce-scatter" in computation:  # a TPU's way to write it
            kind = "reduce-scatter"
        sent = {"all-gather": size * (n - 1), "all-reduce": 2 * size * (n - 1) // n}.get(kind, size * (n - 1) // n)
    axis = "+".join(_axes(groups, mesh))
    return Collective(axis, kind, sent, 1, where) if axis else None


def _axes(groups: np.ndarray, mesh: Mesh) -> Iterator[str]:
    """The axes along which the devices of a group differ. groups: [G, n] places in the mesh."""
    sizes = tuple(mesh.shape.values())
    for axis, places in zip(mesh.shape, np.unravel_index(groups, sizes), strict=True):
        if (places != places[:, :1]).any():
            yield axis


def replica_groups(attributes: str, devices: int) -> np.ndarray:
    """[G, n] device numbers, of any of XLA's spellings.

    `{{0,1},{2,3}}` · `[2,2]<=[4]`, numbers from 0 in rows · `[2,2]<=[2,2]T(1,0)`, those of a transposed array ·
    `mesh['a'=2,'b'=2] {'a'}`, along an axis of an array, or along a part of one, `{'a':(1)2}`: of its size before, and
    its size; a mesh may have `device_ids=([2,2]T(1,0))` or `device_ids=(0,2,1,3)`.
    """
    text = attributes.split("replica_groups=", 1)[1]
    if text.startswith("{"):
        rows = re.findall(r"\{([\d,]+)\}", text[: text.index("}}") + 1]) if text.startswith("{{") else []
        return np.array([row.split(",") for row in rows], int) if rows else np.arange(devices)[None]
    if text.startswith("["):
        shape, source, order = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
        return _iota(source, order).reshape(_ints(shape))
    axes, ids, along = re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? \{([^}]*)\}", text).groups()
    sizes = {name.strip("'"): int(size) for name, size in (axis.split("=") for axis in axes.split(","))}
    numbers = np.arange(math.prod(sizes.values()))
    if ids:
        tiled = re.match(r"(?:\[[\d,]+\])?(?:<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?$", ids)
        numbers = _iota(*tiled.groups()) if tiled else np.array(_ints(ids))
    chosen = re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", along)
    dims, picked = [], []  # the axes, cut where a part of one is meant; which of these are in a group
    for name, size in sizes.items():
        parts = sorted((int(before or 1), int(n or size)) for other, before, n in chosen if other == name)
        at = 1
        for before, n in parts:
            dims += [before // at, n]
            picked.append(len(dims) - 1)
            at = before * n
        dims.append(size // at)
    rest = [i for i in range(len(dims)) if i not in picked]
    return numbers.reshape(dims).transpose(rest + picked).reshape(-1, math.prod(dims[i] for i in picked))


def _iota(dims: str, order: Optional[str]) -> np.ndarray:
    numbers = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return (numbers.transpose(_ints(order)) if order else numbers).ravel()


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
