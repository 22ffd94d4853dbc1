"""Parses the HLO text of a compiled step into computations, and counts the executions of each computation per step."""

import collections
import functools
import re

from pretrainax.planning.hlo.instructions import Instruction, parse_instruction

_VALUE_PRESERVING = (
    "bitcast",
    "copy",
    "convert",
    "reshape",
    "transpose",
)  # opcodes that preserve the value of an integer constant


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
            elif line.startswith("  ") and (instruction := parse_instruction(line)):
                current[instruction.name] = instruction

    def root(self, computation: str) -> Instruction:
        """Returns the root instruction of a computation, which produces the computation's result."""
        return next(x for x in self.computations[computation].values() if x.is_root)

    def result_instructions(self, computation: str) -> list[str]:
        """Returns, for each array in the result of a computation, the name of the instruction that computes it.

        If the root is a tuple, these instructions are its operands. Otherwise each of them is the root itself.
        """
        root, values = self.root(computation), self.computations[computation]
        if root.opcode != "tuple":
            return [root.name] * max(len(root.shapes), 1)
        return [name for name in root.operands for _ in values[name].shapes]

    @functools.cached_property
    def runs(self) -> dict[str, float]:
        """Returns how often each computation is executed per step, by name of the computation.

        The number may be fractional for the branches of a conditional, which are assumed to be equally likely.
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

        The number comes from the compiler's annotation, or from a counter with a constant limit. If the limit depends
        on the data, the result is an upper bound: the length of the longest integer array that the loop carries, or 1
        if it carries none. (In this package, loops with such a limit iterate over blocks of rows per expert, and carry
        an array with one element per block.)
        """
        if match := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(match[1])
        condition, body = loop.attribute("condition"), loop.attribute("body")
        compare = self.root(condition)
        if compare.opcode != "compare" or compare.attribute("direction") != "LT":
            return _longest_array(loop)
        counter, limit = (self.computations[condition][name] for name in compare.operands)
        if counter.opcode != "get-tuple-element" or limit.opcode != "constant":
            return _longest_array(loop)
        index = int(counter.attribute("index"))
        start = self._initial_constant(computation, loop.operands[0], index)
        step = self._increment(body, self.root(body).operands[index])
        return max(-(-(_value(limit) - start) // step), 0)

    def _initial_constant(self, computation: str, operand: str, index: int) -> int:
        """Returns the integer in element `index` of a loop's initial tuple, or 0 if this element is not constant."""
        instructions = self.computations[computation]
        instruction = instructions[operand]
        if instruction.opcode != "tuple":
            return 0
        instruction = instructions[instruction.operands[index]]
        while instruction.opcode in _VALUE_PRESERVING:
            instruction = instructions[instruction.operands[0]]
        return _value(instruction) if instruction.opcode == "constant" else 0

    def _increment(self, body: str, name: str) -> int:
        """Returns the increment of a loop's counter per iteration, or 1 if the increment cannot be parsed.

        Args:
          body: name of the computation of the loop's body.
          name: name of the instruction in the body that computes the new counter.
        """
        instructions, increment = self.computations[body], 0
        while (instruction := instructions[name]).opcode == "add":
            constants = [x for x in instruction.operands if instructions[x].opcode == "constant"]
            others = [x for x in instruction.operands if x not in constants]
            if len(others) != 1:
                return 1
            increment, name = increment + sum(_value(instructions[x]) for x in constants), others[0]
        return max(increment, 1)

    @functools.cached_property
    def fused(self) -> set[str]:
        """Returns the names of the fused computations, whose intermediate values stay in registers."""
        all_instructions = (x for instructions in self.computations.values() for x in instructions.values())
        return {name for x in all_instructions if x.opcode not in ("while", "conditional", "call") for name in x.calls}

    @functools.cached_property
    def callers(self) -> dict[str, tuple[str, Instruction]]:
        """Maps each fused computation to its caller: (name of the calling computation, fusion instruction)."""
        return {
            instruction.attribute("calls"): (name, instruction)
            for name, instructions in self.computations.items()
            for instruction in instructions.values()
            if instruction.opcode == "fusion"
        }


def _longest_array(loop: Instruction) -> int:
    """Returns the length (first axis) of the longest integer array that a loop carries, or 1 if it carries none."""
    return max((x.dims[0] for x in loop.shapes if x.dims and re.match(r"[su]\d", x.dtype)), default=1)


def _value(constant: Instruction) -> int:
    return int(constant.operands[0])
