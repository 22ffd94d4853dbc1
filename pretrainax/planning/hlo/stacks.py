"""Finds stacks of residuals: arrays that a loop over layers fills, one slice per layer, for the backward loop."""

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
    """Arrays that one loop updates slice by slice and that another loop of the same computation reads."""

    def __init__(self, program: Program):
        self._program = program
        self.written: set[Result] = set()  # the updates of stacks, in the body of the writing loop
        self._read: dict[tuple[str, str], Result] = {}  # (body, name) in the reading loop -> update that wrote it
        for name in program.runs:
            for loop in program.computations[name].values():
                if loop.opcode == "while":
                    self._note(name, loop)

    def written_by(self, computation: str, name: str) -> Optional[Result]:
        """Returns the update that wrote the stack of a value in a loop's body; None if the value is not a stack."""
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
        """Returns the in-place update of an element of a loop's state; None if the loop writes the whole element."""
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
    """Yields (index in the loop's state, other loop, index in its result) for arrays that another loop has computed."""
    initial = values[reader.operands[0]]
    for i, name in enumerate(initial.operands if initial.opcode == "tuple" else ()):
        made = values[name]
        while made.opcode in ("bitcast", "copy"):
            made = values[made.operands[0]]
        if made.opcode == "get-tuple-element" and values[made.operands[0]].opcode == "while":
            yield i, values[made.operands[0]], int(made.attribute("index") or 0)


def _is_element(values: dict[str, Instruction], made: Instruction, index: int) -> bool:
    """Returns True if a value is element `index` of the computation's parameter."""
    is_parameter_element = made.opcode == "get-tuple-element" and values[made.operands[0]].opcode == "parameter"
    return is_parameter_element and int(made.attribute("index") or 0) == index
