"""Reads the compiled programs out of a trace, which carries each one that ran in it.

The file is an XSpace (xplane.proto of openxla/xla), whose plane "/host:metadata" has an entry for each program, with
its HloProto. `jax.profiler.ProfileData` gives events alone, and there are none in that plane; so the few fields on the
way are read here, as protocol buffers are encoded (protobuf.dev/programming-guides/encoding).
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxlib import xla_client

from pretrainax.config import UserError
from pretrainax.planning.hlo import Program

_PLANE = b"/host:metadata"
_PROTO = b"Hlo Proto"
# Numbers of fields. XSpace; XPlane; an entry of a map; XEventMetadata; XStatMetadata; XStat; HloProto.
_PLANES, _NAME, _EVENTS, _STATS = 1, 2, 4, 5
_KEY, _VALUE = 1, 2
_EVENT_NAME, _EVENT_STATS = 2, 5
_STAT_NAME = 2
_STAT_OF, _STAT_BYTES = 1, 6
_MODULE = 1


class Message(NamedTuple):
    """Holds the values of a message's fields."""

    numbers: dict[int, int]  # the last one of each
    parts: dict[int, list[bytes]]  # texts, and further messages, in their order

    def messages(self, number: int) -> Iterator["Message"]:
        """Yields those of one field."""
        return map(_read, self.parts.get(number, ()))


class Compiled(NamedTuple):
    """A program that ran in a trace."""

    name: str  # "jit_step"
    program: Program


def programs_of(content: bytes) -> dict[int, Compiled]:
    """Returns the programs of a trace by the numbers that its events call them; UserError for what is no trace."""
    try:
        return dict(_programs(content))
    except (IndexError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"the trace is damaged: {type(e).__name__} where its programs are") from e


def _programs(content: bytes) -> Iterator[tuple[int, Compiled]]:
    for plane in _read(content).messages(_PLANES):
        if plane.parts.get(_NAME) != [_PLANE]:
            continue
        names = {
            entry.numbers[_KEY]: value.parts.get(_STAT_NAME)
            for entry in plane.messages(_STATS)
            for value in entry.messages(_VALUE)
        }
        for event in (value for entry in plane.messages(_EVENTS) for value in entry.messages(_VALUE)):
            named = re.fullmatch(r"(.*)\((\d+)\)", event.parts[_EVENT_NAME][0].decode())
            for stat in event.messages(_EVENT_STATS):
                if named and names.get(stat.numbers[_STAT_OF]) == [_PROTO]:
                    (proto,) = stat.messages(_STAT_BYTES)
                    yield int(named[2]), Compiled(named[1], _program(proto.parts[_MODULE][0]))


def _program(module: bytes) -> Program:
    return Program(xla_client.XlaComputation(module).get_hlo_module().to_string())


def _read(message: bytes) -> Message:
    found, at = Message({}, {}), 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 0:
            found.numbers[key >> 3], at = _varint(message, at)
        else:
            size, at = _varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            found.parts.setdefault(key >> 3, []).append(message[at : at + size])
            at += size
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at a place, and where it ends."""
    number, shift = 0, 0
    while True:
        byte = message[at]
        number, at, shift = number | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return number, at
