"""Parses the HLO text of a compiled step into computations, and counts how often the step runs each computation."""

import collections
import functools
import re

from pretrainax.planning.hlo.instructions import Instruction, parse_instruction

_SAME_NUMBER = (
    "bitcast",
    "copy",
    "convert",
    "reshape",
    "transpose",
)  # opcodes that do not change the value of a constant


class Program:
    """A parsed HLO module: `computations` is {name of the computation: {name of the instruction: instruction}}."""

    def __init__(self, text: str):
        """Parses HLO text, the result of `compiled.as_text()`."""
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        for line in text.splitlines():
            if header := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
                current = self.computations[header[2]] = {}
                self.entry = header[2] if header[1] else self.entry
            elif line.startswith("  ") and (found := parse_instruction(line)):
                current[found.name] = found

    def root(self, computation: str) -> Instruction:
        """Returns the root instruction of a computation, whose result is the result of the computation."""
        return next(x for x in self.computations[computation].values() if x.is_root)

    def makers(self, computation: str) -> list[str]:
        """Returns, for each array in the result of a computation, the name of the instruction that computes the array.

        If the root is a tuple, these are operands of the root. Otherwise this is always the root itself.
        """
        root, values = self.root(computation), self.computations[computation]
        if root.opcode != "tuple":
            return [root.name] * max(len(root.shapes), 1)
        return [name for name in root.operands for _ in values[name].shapes]

    @functools.cached_property
    def runs(self) -> dict[str, float]:
        """Returns the number of runs of each computation per step, {name: runs}.

        The number may be a fraction for branches of a conditional: the analysis assumes that they run equally often.
        """
        runs: collections.Counter = collections.Counter()

        def visit(name: str, times: float) -> None:
            runs[name] += times  # pyright: ignore[reportArgumentType]
            for instruction in self.computations[name].values():
                iterations = self.trip_count(name, instruction) if instruction.opcode == "while" else 1
                branches = len(instruction.calls) if instruction.opcode == "conditional" else 1
                for called in instruction.calls:
                    visit(called, times * iterations / branches)

        visit(self.entry, 1)
        return dict(runs)

    def trip_count(self, computation: str, loop: Instruction) -> int:
        """Returns the number of iterations of a `while` instruction.

        The number is from the compiler, or from a counter with a constant limit. If the limit depends on the data, the
        result is the maximum: the length of the longest integer array that the loop carries. (Such loops of this
        package run over blocks of rows per expert and have one array element per block.) Without an integer array, the
        result is 1.
        """
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        condition, body = loop.attribute("condition"), loop.attribute("body")
        compare = self.root(condition)
        if compare.opcode != "compare" or compare.attribute("direction") != "LT":
            return _longest_array(loop)
        counter, limit = (self.computations[condition][name] for name in compare.operands)
        if counter.opcode != "get-tuple-element" or limit.opcode != "constant":
            return _longest_array(loop)
        index = int(counter.attribute("index"))
        start = self._constant(computation, loop.operands[0], index)
        step = self._added(body, self.root(body).operands[index])
        return max(-(-(_value(limit) - start) // step), 0)

    def _constant(self, computation: str, operand: str, index: int) -> int:
        """Returns the integer in element `index` of the initial tuple of a loop; 0 if this element is not constant."""
        instructions = self.computations[computation]
        made = instructions[operand]
        if made.opcode != "tuple":
            return 0
        made = instructions[made.operands[index]]
        while made.opcode in _SAME_NUMBER:
            made = instructions[made.operands[0]]
        return _value(made) if made.opcode == "constant" else 0

    def _added(self, body: str, name: str) -> int:
        """Returns the increment of a loop's counter per iteration; 1 if the increment cannot be parsed.

        Args:
          body: name of the computation of the loop's body.
          name: name of the instruction in the body that computes the new counter.
        """
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
        """Returns the names of fused computations. Their values stay in registers, except for the result."""
        all_instructions = (x for instructions in self.computations.values() for x in instructions.values())
        return {name for x in all_instructions if x.opcode not in ("while", "conditional", "call") for name in x.calls}

    @functools.cached_property
    def callers(self) -> dict[str, tuple[str, Instruction]]:
        """Returns {fused computation: (name of the computation that calls it, fusion instruction)}."""
        return {
            made.attribute("calls"): (name, made)
            for name, instructions in self.computations.items()
            for made in instructions.values()
            if made.opcode == "fusion"
        }


def _longest_array(loop: Instruction) -> int:
    """Returns the length (first axis) of the longest integer array that a loop carries; 1 without such an array."""
    return max((x.dims[0] for x in loop.shapes if x.dims and re.match(r"[su]\d", x.dtype)), default=1)


def _value(constant: Instruction) -> int:
    return int(constant.operands[0])
