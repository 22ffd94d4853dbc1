"""Encodes traces for tests: an XSpace of planes, lines and events, as protocol buffers (xplane.proto)."""

from typing import NamedTuple, Union

Value = Union[int, str, bytes]


class Event(NamedTuple):
    name: str
    start: int  # nanoseconds, like duration
    duration: int
    stats: dict[str, Value] = {}


Plane = tuple[str, dict[str, list[Event]]]  # name, and the events of each line


def xspace(planes: list[Plane], programs: dict[str, bytes]) -> bytes:
    """Returns the content of the file; programs: "jit_step(7)" -> its serialized HloModuleProto."""
    return b"".join(field(1, plane(*one)) for one in planes) + field(1, metadata_plane(programs))


def plane(name: str, lines: dict[str, list[Event]]) -> bytes:
    events = sorted({event.name for line in lines.values() for event in line})
    stats = sorted({stat for line in lines.values() for event in line for stat in event.stats})
    encoded = [
        field(2, line)
        + b"".join(
            field(4, numbers(events.index(e.name) + 1, e.start * 1000, e.duration * 1000) + of_stats(e.stats, stats))
            for e in found
        )
        for line, found in lines.items()
    ]
    return field(2, name) + b"".join(field(3, line) for line in encoded) + names(4, events) + names(5, stats)


def metadata_plane(programs: dict[str, bytes]) -> bytes:
    entries = b""
    for number, (name, module) in enumerate(programs.items(), 1):
        stat = field(1, 1) + field(6, field(1, module))
        entries += field(4, field(1, number) + field(2, field(1, number) + field(2, name) + field(5, stat)))
    return field(2, "/host:metadata") + entries + names(5, ["Hlo Proto"])


def of_stats(values: dict[str, Value], known: list[str]) -> bytes:
    kinds = {int: 4, str: 5, bytes: 6}
    return b"".join(
        field(4, field(1, known.index(name) + 1) + field(kinds[type(value)], value)) for name, value in values.items()
    )


def names(number: int, found: list[str]) -> bytes:
    """Encodes the map from numbers, starting at 1, to names."""
    return b"".join(
        field(number, field(1, i) + field(2, field(1, i) + field(2, name))) for i, name in enumerate(found, 1)
    )


def numbers(*values: int) -> bytes:
    return b"".join(field(i, value) for i, value in enumerate(values, 1))


def field(number: int, value: Value) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
