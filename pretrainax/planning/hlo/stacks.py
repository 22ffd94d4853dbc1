"""Finds stacks of residuals: what the loop over layers leaves, a slice a turn, for the loop of the backward."""

from collections.abc import Iterator
from typing import NamedTuple, Optional

from pretrainax.planning.hlo.instructions import Instruction
from pretrainax.planning.hlo.kernels import UPDATES, behind_bitcasts, fused_by, updates
from pretrainax.planning.hlo.program import Program


class Result(NamedTuple):
    """One array that an instruction makes."""

    computation: str
    name: str
    index: int


class Stacks:
    """The arrays that one loop updates slice by slice and another loop of the same computation is given."""

    def __init__(self, program: Program):
        self._program = program
        self.written: set[Result] = set()  # what updates them, in the body of the loop that fills them
        self._read: dict[tuple[str, str], Result] = {}  # (body, name) of the reading loop -> what has written it
        for name in program.runs:
            for loop in program.computations[name].values():
                if loop.opcode == "while":
                    self._note(name, loop)

    def written_by(self, computation: str, name: str) -> Optional[Result]:
        """Returns what has written the stack that a value of a loop's body is; None where it is none."""
        made = behind_bitcasts(values := self._program.computations[computation], values[name])
        return self._read.get((computation, made.name))

    def _note(self, computation: str, reader: Instruction) -> None:
        values, body = self._program.computations[computation], _body(reader)
        for i, other, j in _handed_on(values, reader):
            if update := self._update(_body(other), j):
                self.written.add(update)
                for made in self._program.computations[body].values():
                    if _is_element(self._program.computations[body], made, i):
                        self._read[body, made.name] = update

    def _update(self, body: str, index: int) -> Optional[Result]:
        """Finds what updates an element of a loop's state in place; None where all of it is made anew."""
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


def _handed_on(values: dict[str, Instruction], reader: Instruction) -> Iterator[tuple[int, Instruction, int]]:
    """Yields (element of the loop's state, another loop, element of its result) for what the other loop has made."""
    given = values[reader.operands[0]]
    for i, name in enumerate(given.operands if given.opcode == "tuple" else ()):
        made = values[name]
        while made.opcode in ("bitcast", "copy"):
            made = values[made.operands[0]]
        if made.opcode == "get-tuple-element" and values[made.operands[0]].opcode == "while":
            yield i, values[made.operands[0]], int(made.attribute("index") or 0)


def _is_element(values: dict[str, Instruction], made: Instruction, index: int) -> bool:
    """Returns True if a value is that element of what the computation is given."""
    is_taken = made.opcode == "get-tuple-element" and values[made.operands[0]].opcode == "parameter"
    return is_taken and int(made.attribute("index") or 0) == index
