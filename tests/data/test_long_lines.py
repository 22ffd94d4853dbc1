"""Tests that the parser of long JSON lines returns the same values as `json`."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrainax.data import long_lines

TEXT = st.text(alphabet=st.sampled_from('ab"\\/\n\t\x01é字😀\u2028'), max_size=60)


@settings(max_examples=300, deadline=None)
@given(TEXT, TEXT, st.booleans())
def test_record_is_that_of_json(text, other, ascii_only):
    record = {"text": text, "list": [other, {other: text}], "number": 3, "short": "b"}
    line = bytearray(json.dumps(record, ensure_ascii=ascii_only).encode() + b"\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_lines, "LONG_LINE_BYTES", 16)
        parsed = long_lines.parse(line)
    if isinstance(parsed["text"], bytearray):
        parsed["text"] = parsed["text"].decode()
    assert (parsed, len(line)) == (record, 0)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (b"", "Unterminated string"),
        (b'"', "delimiter"),
        (b'\x01"}', "control character"),
        (b'\xff"}', "invalid start byte"),
        (b'\\ud800"}', "surrogates not allowed"),
        (b'\\q"}', "escape"),
    ],
)
def test_broken_line_is_an_error(monkeypatch, end, message):
    monkeypatch.setattr(long_lines, "LONG_LINE_BYTES", 16)
    with pytest.raises(ValueError, match=message):
        long_lines.parse(bytearray(b'{"text": "' + b"a" * 30 + end))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40)), st.booleans())
def test_lines_are_those_of_the_file(lengths, ends):
    lines = [b"x" * n + b"\n" for n in lengths]
    content = b"".join(lines) + (b"" if ends else b"end")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_lines, "LONG_LINE_BYTES", 16)
        f = io.BytesIO(content)
        assert list(iter(lambda: bytes(long_lines.read_line(f)), b"")) == [*lines, *([] if ends else [b"end"])]
