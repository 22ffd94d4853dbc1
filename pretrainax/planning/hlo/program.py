"""A module of HLO text: its computations, and how often a step runs each of them."""

import collections
import functools
import re

from pretrainax.planning.hlo.instructions import Instruction, parse_instruction

_SAME_NUMBER = ("bitcast", "copy", "convert", "reshape", "transpose")  # opcodes through which a constant is followed


class Program:
    """A parsed HLO module: computations of instructions, by name."""

    def __init__(self, text: str):
        """Parses the text of `compiled.as_text()`."""
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        for line in text.splitlines():
            if header := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
                current = self.computations[header[2]] = {}
                self.entry = header[2] if header[1] else self.entry
            elif line.startswith("  ") and (found := parse_instruction(line)):
                current[found.name] = found

    def root(self, computation: str) -> Instruction:
        """Returns the instruction whose result is that of the computation."""
        return next(x for x in self.computations[computation].values() if x.is_root)

    def makers(self, computation: str) -> list[str]:
        """Names what makes each array of a computation's result, in their order; all of a tuple within it alike."""
        root, values = self.root(computation), self.computations[computation]
        if root.opcode != "tuple":
            return [root.name] * max(len(root.shapes), 1)
        return [name for name in root.operands for _ in values[name].shapes]

    @functools.cached_property
    def runs(self) -> dict[str, float]:
        """Counts how often a step runs each computation; of a conditional each branch as often as the others."""
        runs: collections.Counter = collections.Counter()

        def visit(name: str, times: float) -> None:
            runs[name] += times  # pyright: ignore[reportArgumentType]
            for instruction in self.computations[name].values():
                turns = self.trip_count(name, instruction) if instruction.opcode == "while" else 1
                branches = len(instruction.calls) if instruction.opcode == "conditional" else 1
                for called in instruction.calls:
                    visit(called, times * turns / branches)

        visit(self.entry, 1)
        return dict(runs)

    def trip_count(self, computation: str, loop: Instruction) -> int:
        """Counts the turns of a `while`: as the compiler says, or by a counter that goes up to a constant. Of one that
        ends where the step itself finds so, at most: those in which it comes to the end of its longest list of
        numbers, a line a turn (blocks of rows, each of an expert); 1 where it has none."""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        condition, body = loop.attribute("condition"), loop.attribute("body")
        compare = self.root(condition)
        if compare.opcode != "compare" or compare.attribute("direction") != "LT":
            return _lines(loop)
        counter, limit = (self.computations[condition][name] for name in compare.operands)
        if counter.opcode != "get-tuple-element" or limit.opcode != "constant":
            return _lines(loop)
        index = int(counter.attribute("index"))
        start = self._constant(computation, loop.operands[0], index)
        step = self._added(body, self.root(body).operands[index])
        return max(-(-(_value(limit) - start) // step), 0)

    def _constant(self, computation: str, operand: str, index: int) -> int:
        """Returns element `index` of the tuple that a loop begins with; 0 where it is no constant."""
        instructions = self.computations[computation]
        made = instructions[operand]
        if made.opcode != "tuple":
            return 0
        made = instructions[made.operands[index]]
        while made.opcode in _SAME_NUMBER:
            made = instructions[made.operands[0]]
        return _value(made) if made.opcode == "constant" else 0

    def _added(self, body: str, name: str) -> int:
        """Returns what one turn adds to a counter; 1 where that cannot be read."""
        instructions, added = self.computations[body], 0
        while (made := instructions[name]).opcode == "add":
            constants = [x for x in made.operands if instructions[x].opcode == "constant"]
            others = [x for x in made.operands if x not in constants]
            if len(others) != 1:
                return 1
            added, name = added + sum(_value(instructions[x]) for x in constants), others[0]
        return max(added, 1)

    @functools.cached_property
    def fused(self) -> set[str]:
        """Names the computations whose values never leave the device's registers, but for the result."""
        every = (x for instructions in self.computations.values() for x in instructions.values())
        return {name for x in every if x.opcode not in ("while", "conditional", "call") for name in x.calls}

    @functools.cached_property
    def callers(self) -> dict[str, tuple[str, Instruction]]:
        """Finds the computation and the fusion that each fused computation is run by."""
        return {
            made.attribute("calls"): (name, made)
            for name, instructions in self.computations.items()
            for made in instructions.values()
            if made.opcode == "fusion"
        }


def _lines(loop: Instruction) -> int:
    """Counts the lines of the longest list of numbers that a loop carries; 1 where there is none."""
    return max((x.dims[0] for x in loop.shapes if x.dims and re.match(r"[su]\d", x.dtype)), default=1)


def _value(constant: Instruction) -> int:
    return int(constant.operands[0])
