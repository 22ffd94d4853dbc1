"""Reads the compiled programs out of a trace, which carries each one that ran in it.

The file is an XSpace (xplane.proto of openxla/xla), whose plane "/host:metadata" has an entry for each program, with
its HloProto. `jax.profiler.ProfileData` gives events alone, and there are none in that plane; so the few fields on the
way are read here, as protocol buffers are encoded (protobuf.dev/programming-guides/encoding).
"""

import re
from collections.abc import Iterator
from typing import NamedTuple, Union

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

Fields = dict[int, list[Union[int, bytes]]]


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
    for plane in map(_fields, _fields(content).get(_PLANES, ())):
        if plane.get(_NAME) != [_PLANE]:
            continue
        stats = {
            entry[_KEY][0]: _fields(entry[_VALUE][0]).get(_STAT_NAME) for entry in map(_fields, plane.get(_STATS, ()))
        }
        for entry in map(_fields, plane.get(_EVENTS, ())):
            event = _fields(entry[_VALUE][0])
            named = re.fullmatch(r"(.*)\((\d+)\)", str(event[_EVENT_NAME][0], "utf-8"))
            for stat in map(_fields, event.get(_EVENT_STATS, ())):
                if named and stats.get(stat[_STAT_OF][0]) == [_PROTO]:
                    yield int(named[2]), Compiled(named[1], _program(_fields(stat[_STAT_BYTES][0])[_MODULE][0]))


def _program(module: bytes) -> Program:
    return Program(xla_client.XlaComputation(module).get_hlo_module().to_string())


def _fields(message: bytes) -> Fields:
    """Returns the values of each field of a message, those of a number that stands once too."""
    found: Fields = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 0:
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = message[at : at + size], at + size
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins at a place, and where it ends."""
    number, shift = 0, 0
    while True:
        byte = message[at]
        number, at, shift = number | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return number, at
