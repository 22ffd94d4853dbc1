"""Finds stacks of residuals: arrays that a forward loop over layers fills with one slice per layer.

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
    """The stacks of a program: arrays that one loop updates slice by slice and that a later loop reads."""

    def __init__(self, program: Program):
        self._program = program
        self.written: set[Result] = set()  # the updates of stacks in bodies of writing loops
        self._read: dict[tuple[str, str], Result] = {}  # (body, name) of a stack in a reading loop -> its update
        for name in program.runs:
            for loop in program.computations[name].values():
                if loop.opcode == "while":
                    self._note(name, loop)

    def written_by(self, computation: str, name: str) -> Optional[Result]:
        """Returns the update instruction that filled a stack; None if the value is not a stack.

        Args:
          computation: the body of a loop that reads the stack.
          name: name of the value in this computation.
        """
        made = behind_bitcasts(values := self._program.computations[computation], values[name])
        return self._read.get((computation, made.name))

    def _note(self, computation: str, reader: Instruction) -> None:
        values, body = self._program.computations[computation], _body(reader)
        for i, other, j in _arrays_of_other_loops(values, reader):
            if update := self._update(_body(other), j):
                self.written.add(update)
                for made in self._program.computations[body].values():
                    if _is_element(self._program.computations[body], made, i):
                        self._read[body, made.name] = update

    def _update(self, body: str, index: int) -> Optional[Result]:
        """Returns the in-place update of one element of a loop's state; None if the loop writes the whole element.

        Args:
          body: name of the computation of the loop's body.
          index: index of the element in the state.
        """
        values = self._program.computations[body]
        root, place = self._program.root(body), 0
        if root.opcode != "tuple":
            return None
        made = behind_bitcasts(values, values[root.operands[index]])
        if made.opcode == "get-tuple-element":
            made, place = values[made.operands[0]], int(made.attribute("index") or 0)
        if made.opcode == "fusion":
            ends = updates(self._program, fused_by(made))
            is_update = place < len(ends) and ends[place] is not None
        else:
            is_update = made.opcode in UPDATES
        return Result(body, made.name, place) if is_update else None


def _body(loop: Instruction) -> str:
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
        made = values[name]
        while made.opcode in ("bitcast", "copy"):
            made = values[made.operands[0]]
        if made.opcode == "get-tuple-element" and values[made.operands[0]].opcode == "while":
            yield i, values[made.operands[0]], int(made.attribute("index") or 0)


def _is_element(values: dict[str, Instruction], made: Instruction, index: int) -> bool:
    """Returns True if a value is element `index` of the computation's parameter, a tuple."""
    is_parameter_element = made.opcode == "get-tuple-element" and values[made.operands[0]].opcode == "parameter"
    return is_parameter_element and int(made.attribute("index") or 0) == index
