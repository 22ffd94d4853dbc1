"""Parses JSON lines of any length in little memory: long strings stay UTF-8 and are never decoded as a whole.

A Python string takes 4 bytes per character as soon as it contains an emoji. For a line of 200 MB, the line, the decoded
line and the decoded string in it would take 1.8 GB together. This module holds only the line and the string's UTF-8.
"""

import codecs
import io
import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Union

LONG_LINE_BYTES = 1 << 22  # bytes; longer lines are parsed here, and strings longer than this stay UTF-8
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("|\Z)', re.DOTALL)
_ESCAPE = re.compile(rb"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|\\u\w{4}|\\.", re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")


def read_line(f: io.BufferedIOBase, most: int = sys.maxsize) -> Union[bytes, bytearray]:
    """Reads the next line, including its line end; a long line is read into a bytearray, which grows in place.

    If the line has more than `most` bytes, returns a prefix of it that also has more than `most` bytes, and leaves the
    rest unread.
    """
    line = f.readline(LONG_LINE_BYTES)
    if len(line) < LONG_LINE_BYTES or line.endswith(b"\n"):
        return line
    line = bytearray(line)
    while len(line) <= most and (chunk := f.readline(LONG_LINE_BYTES)):
        line += chunk
        if chunk.endswith(b"\n"):
            break
    return line


def parse(line: bytearray) -> Any:
    """Parses a line of JSON like json.loads, but returns long strings as bytearrays of UTF-8. Empties `line`.

    A long string has more than LONG_LINE_BYTES. Only values of the outermost object are bytearrays: nested strings and
    names of fields are decoded.

    Raises:
      ValueError: the JSON is invalid, or a string is not Unicode.
    """
    shortened, strings, end = bytearray(), {}, 0
    for match in _STRING.finditer(line):
        start, stop = match.span()
        if stop - start > LONG_LINE_BYTES and match[1]:
            placeholder = f"\0{len(strings)}\0"  # stands for the string in `shortened`
            shortened += line[end:start] + json.dumps(placeholder).encode()
            strings[placeholder], end = _unescape(line, start + 1, stop - 1), stop
    shortened += line[end:]
    match = None  # releases the reference to the line
    line.clear()
    try:
        record = json.loads(shortened.decode("utf-8-sig").rstrip())
    except json.JSONDecodeError as e:
        raise ValueError(f"broken JSON in a very long line ({e.msg})") from e
    if not isinstance(record, dict):
        return _with_strings(record, strings)
    return {
        _with_strings(key, strings): (
            strings.get(value, value) if isinstance(value, str) else _with_strings(value, strings)
        )
        for key, value in record.items()
    }


def _with_strings(value: object, strings: Mapping[str, bytearray]) -> object:
    """Replaces the placeholders in a JSON value by their strings, decoded."""
    if isinstance(value, dict):
        return {_with_strings(key, strings): _with_strings(x, strings) for key, x in value.items()}
    if isinstance(value, list):
        return [_with_strings(x, strings) for x in value]
    return strings[value].decode() if isinstance(value, str) and value in strings else value


def _unescape(line: bytearray, start: int, stop: int) -> bytearray:
    """Decodes the escapes in the JSON string line[start:stop], without its quotes, and returns it as UTF-8.

    Raises:
      ValueError: the string has a control character or is not Unicode.
    """
    if _CONTROL.search(line, start, stop):
        raise ValueError("broken JSON in a very long line (control character in a string)")
    text, decode = bytearray(), codecs.getincrementaldecoder("utf-8")().decode
    decoded_escapes = {}
    with memoryview(line) as view:
        for match in _ESCAPE.finditer(line, start, stop):
            text += view[start : match.start()]
            escape = match[0]
            if escape not in decoded_escapes:
                decoded_escapes[escape] = json.loads(b'"%b"' % escape).encode()
            text += decoded_escapes[escape]
            start = match.end()
        text += view[start:stop]
    with memoryview(text) as view:
        for i in range(0, len(text), LONG_LINE_BYTES):
            decode(view[i : i + LONG_LINE_BYTES], final=i + LONG_LINE_BYTES >= len(text))
    return text
