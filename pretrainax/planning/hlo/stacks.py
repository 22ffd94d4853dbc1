"""Finds stacked residuals: arrays that a forward loop over layers fills with one slice per layer.

The backward loop over the layers reads these slices.
"""

from collections.abc import Iterator
from typing import NamedTuple, Optional

from pretrainax.planning.hlo.instructions import Instruction
from pretrainax.planning.hlo.kernels import UPDATES, behind_bitcasts, fused_by, updates
from pretrainax.planning.hlo.program import Program


class Result(NamedTuple):
    """One array of an instruction's result."""

    computation: str
    name: str
    index: int


class Stacks:
    """The stacked residuals of a program: arrays that one loop updates slice by slice and that a later loop reads."""

    def __init__(self, program: Program):
        self._program = program
        self.written: set[Result] = set()  # the updates of stacks, in bodies of the loops that write them
        self._updates_by_reader: dict[
            tuple[str, str], Result
        ] = {}  # (body of the reading loop, name of the stack in it) -> update of the stack
        for name in program.runs:
            for loop in program.computations[name].values():
                if loop.opcode == "while":
                    self._add_stacks_of(name, loop)

    def written_by(self, computation: str, name: str) -> Optional[Result]:
        """Returns the update instruction that filled a stack, or None if the value is not a stack.

        Args:
          computation: the body of a loop that reads the stack.
          name: name of the value in this computation.
        """
        instruction = behind_bitcasts(values := self._program.computations[computation], values[name])
        return self._updates_by_reader.get((computation, instruction.name))

    def _add_stacks_of(self, computation: str, reader: Instruction) -> None:
        """Finds the stacks that a loop reads, and stores them in this object.

        Args:
          computation: name of the computation that contains the loop.
          reader: the `while` instruction of the reading loop.
        """
        values, body = self._program.computations[computation], _body(reader)
        for i, writer, j in _arrays_of_other_loops(values, reader):
            if update := self._update(_body(writer), j):
                self.written.add(update)
                for instruction in self._program.computations[body].values():
                    if _is_element(self._program.computations[body], instruction, i):
                        self._updates_by_reader[body, instruction.name] = update

    def _update(self, body: str, index: int) -> Optional[Result]:
        """Returns the in-place update of one element of a loop's state, or None if the loop writes the whole element.

        Args:
          body: name of the computation of the loop's body.
          index: index of the element in the loop's state.
        """
        values = self._program.computations[body]
        root, result_index = self._program.root(body), 0
        if root.opcode != "tuple":
            return None
        instruction = behind_bitcasts(values, values[root.operands[index]])
        if instruction.opcode == "get-tuple-element":
            instruction, result_index = values[instruction.operands[0]], int(instruction.attribute("index") or 0)
        if instruction.opcode == "fusion":
            array_updates = updates(self._program, fused_by(instruction))
            is_update = result_index < len(array_updates) and array_updates[result_index] is not None
        else:
            is_update = instruction.opcode in UPDATES
        return Result(body, instruction.name, result_index) if is_update else None


def _body(loop: Instruction) -> str:
    """Returns the name of the computation that is a loop's body."""
    body = loop.attribute("body")
    assert body is not None, loop
    return body


def _arrays_of_other_loops(
    values: dict[str, Instruction], reader: Instruction
) -> Iterator[tuple[int, Instruction, int]]:
    """Yields the arrays that a loop reads from the results of other loops.

    Each item is (index in the state of `reader`, the other loop, index in the result of the other loop).

    Args:
      values: the instructions of the computation that contains the loops, by name.
      reader: the `while` instruction of the reading loop.
    """
    initial = values[reader.operands[0]]
    for i, name in enumerate(initial.operands if initial.opcode == "tuple" else ()):
        instruction = values[name]
        while instruction.opcode in ("bitcast", "copy"):
            instruction = values[instruction.operands[0]]
        if instruction.opcode == "get-tuple-element" and values[instruction.operands[0]].opcode == "while":
            yield i, values[instruction.operands[0]], int(instruction.attribute("index") or 0)


def _is_element(values: dict[str, Instruction], instruction: Instruction, index: int) -> bool:
    """Checks whether an instruction reads element `index` of the computation's parameter, which is a tuple."""
    is_parameter_element = (
        instruction.opcode == "get-tuple-element" and values[instruction.operands[0]].opcode == "parameter"
    )
    return is_parameter_element and int(instruction.attribute("index") or 0) == index
