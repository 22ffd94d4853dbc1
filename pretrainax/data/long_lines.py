"""Parses JSON lines of any length in little memory: long strings stay UTF-8 and are never decoded as a whole.

A Python string takes 4 bytes per character as soon as it contains an emoji. A line of 200 MB, its decoded form and the
string in it would take 1.8 GB. This module holds only the line and the UTF-8 of its text.
"""

import codecs
import io
import json
import re
import sys
from typing import Any, Union

LONG_LINE_BYTES = 1 << 22  # bytes; longer lines are parsed here, and their longer strings stay UTF-8
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("|\Z)', re.DOTALL)
_ESCAPE = re.compile(rb"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|\\u\w{4}|\\.", re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")


def read_line(f: io.BufferedIOBase, most: int = sys.maxsize) -> Union[bytes, bytearray]:
    """Returns the next line, including its line end; a long line as a bytearray, which grows in place.

    If a line has more than `most` bytes, the result is a prefix with more than `most` bytes. The rest stays unread.
    """
    line = f.readline(LONG_LINE_BYTES)
    if len(line) < LONG_LINE_BYTES or line.endswith(b"\n"):
        return line
    line = bytearray(line)
    while len(line) <= most and (part := f.readline(LONG_LINE_BYTES)):
        line += part
        if part.endswith(b"\n"):
            break
    return line


def parse(line: bytearray) -> Any:
    """Parses a line of JSON like json.loads, but represents long strings by bytearrays of UTF-8. Empties `line`.

    This applies to strings of more than LONG_LINE_BYTES that are values of the outermost object.

    Raises:
      ValueError: the JSON is invalid, or a string is not Unicode.
    """
    short, strings, end = bytearray(), {}, 0
    for match in _STRING.finditer(line):
        start, stop = match.span()
        if stop - start > LONG_LINE_BYTES and match[1]:
            name = f"\0{len(strings)}\0"  # placeholder for the string
            short += line[end:start] + json.dumps(name).encode()
            strings[name], end = _unescaped(line, start + 1, stop - 1), stop
    short += line[end:]
    match = None  # releases the reference to the line
    line.clear()
    try:
        record = json.loads(short.decode("utf-8-sig").rstrip())
    except json.JSONDecodeError as e:
        raise ValueError(f"broken JSON in a very long line ({e.msg})") from e
    if isinstance(record, dict):
        record = {key: strings.get(value, value) if isinstance(value, str) else value for key, value in record.items()}
    return record


def _unescaped(line: bytearray, start: int, stop: int) -> bytearray:
    """Returns the UTF-8 of the JSON string in line[start:stop], which excludes the quotes.

    Raises:
      ValueError: the string has a control character or is not Unicode.
    """
    if _CONTROL.search(line, start, stop):
        raise ValueError("broken JSON in a very long line (control character in a string)")
    text, decode = bytearray(), codecs.getincrementaldecoder("utf-8")().decode
    decoded = {}
    with memoryview(line) as view:
        for match in _ESCAPE.finditer(line, start, stop):
            text += view[start : match.start()]
            escape = match[0]
            if escape not in decoded:
                decoded[escape] = json.loads(b'"%b"' % escape).encode()
            text += decoded[escape]
            start = match.end()
        text += view[start:stop]
    with memoryview(text) as view:
        for i in range(0, len(text), LONG_LINE_BYTES):
            decode(view[i : i + LONG_LINE_BYTES], final=i + LONG_LINE_BYTES >= len(text))
    return text
