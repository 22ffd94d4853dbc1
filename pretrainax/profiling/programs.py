"""Reads the compiled programs in a trace file, which contains each program that ran during the trace.

A trace file is an XSpace message (xplane.proto in openxla/xla). Its plane "/host:metadata" contains the HloProto of
each program, but `jax.profiler.ProfileData` gives access only to events, and this plane has none. This module therefore
decodes the necessary fields from the protocol buffer encoding (protobuf.dev/programming-guides/encoding).
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxlib import xla_client

from pretrainax.config import UserError
from pretrainax.planning.hlo import Program

_PLANE = b"/host:metadata"
_PROTO = b"Hlo Proto"
# Field numbers. One message per line: XSpace (planes) and XPlane; a map entry; XEventMetadata; XStatMetadata; XStat;
# HloProto.
_PLANES, _NAME, _EVENTS, _STATS = 1, 2, 4, 5
_KEY, _VALUE = 1, 2
_EVENT_NAME, _EVENT_STATS = 2, 5
_STAT_NAME = 2
_STAT_OF, _STAT_BYTES = 1, 6
_MODULE = 1


class Message(NamedTuple):
    """A decoded protocol buffer message: its field values by field number."""

    numbers: dict[int, int]  # field number -> last value of an integer field
    parts: dict[int, list[bytes]]  # field number -> encoded strings or nested messages, in order

    def messages(self, number: int) -> Iterator["Message"]:
        """Yields the decoded nested messages of the field with this number."""
        return map(_decode, self.parts.get(number, ()))


class Compiled(NamedTuple):
    """A program that ran during a trace."""

    name: str  # "jit_step"
    program: Program


def programs_of(content: bytes) -> dict[int, Compiled]:
    """Decodes the compiled programs in a trace file; returns them by program id.

    Args:
      content: the content of the file.

    Raises:
      UserError: the file is damaged.
    """
    try:
        return dict(_programs(content))
    except (IndexError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"the trace is damaged: {type(e).__name__} while reading its programs") from e


def _programs(content: bytes) -> Iterator[tuple[int, Compiled]]:
    """Yields (program id, program) for each program in a trace file."""
    for plane in _decode(content).messages(_PLANES):
        if plane.parts.get(_NAME) != [_PLANE]:
            continue
        names = {
            entry.numbers[_KEY]: value.parts.get(_STAT_NAME)
            for entry in plane.messages(_STATS)
            for value in entry.messages(_VALUE)
        }
        for event in (value for entry in plane.messages(_EVENTS) for value in entry.messages(_VALUE)):
            match = re.fullmatch(r"(.*)\((\d+)\)", event.parts[_EVENT_NAME][0].decode())
            for stat in event.messages(_EVENT_STATS):
                if match and names.get(stat.numbers[_STAT_OF]) == [_PROTO]:
                    (proto,) = stat.messages(_STAT_BYTES)
                    yield int(match[2]), Compiled(match[1], _parse_program(proto.parts[_MODULE][0]))


def _parse_program(module: bytes) -> Program:
    """Parses a serialized HloModuleProto."""
    return Program(xla_client.XlaComputation(module).get_hlo_module().to_string())


def _decode(message: bytes) -> Message:
    """Decodes the fields of a protocol buffer message, leaving nested messages encoded."""
    fields, position = Message({}, {}), 0
    while position < len(message):
        key, position = _decode_varint(message, position)
        if key & 7 == 0:
            fields.numbers[key >> 3], position = _decode_varint(message, position)
        else:
            size, position = _decode_varint(message, position) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], position)
            fields.parts.setdefault(key >> 3, []).append(message[position : position + size])
            position += size
    return fields


def _decode_varint(message: bytes, at: int) -> tuple[int, int]:
    """Decodes the varint at byte position `at` of the message; returns (value, position after the varint)."""
    number, shift = 0, 0
    while True:
        byte = message[at]
        number, at, shift = number | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return number, at
