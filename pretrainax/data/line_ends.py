"""Removes byte-order marks and the carriage returns of Windows line ends from text."""

import collections
from typing import Any, TypeVar

MARKS, RETURNS = "byte-order marks", "carriage returns"  # names of the counters

Text = TypeVar("Text", str, bytearray)
_STR_PATTERNS: Any = ("\ufeff", "\r\n", "\n", "\r")
_BYTES_PATTERNS: Any = (b"\xef\xbb\xbf", b"\r\n", b"\n", b"\r")


def normalize_line_ends(text: Text, found: collections.Counter) -> Text:
    """Removes the byte-order mark from a text, and replaces Windows line ends with "\\n".

    Args:
      text: a str, or a bytearray of UTF-8.
      found: a counter to which the numbers of removed byte-order marks and carriage returns are added.
    """
    byte_order_mark, crlf, newline, carriage_return = _STR_PATTERNS if isinstance(text, str) else _BYTES_PATTERNS
    if text.startswith(byte_order_mark):
        found[MARKS] += 1
        text = text[len(byte_order_mark) :]
    if crlf in text or text.endswith(carriage_return):
        found[RETURNS] += text.count(crlf) + text.endswith(carriage_return)
        # A text may be cut in the middle of a line end, after the carriage return.
        text = text.replace(crlf, newline).removesuffix(carriage_return)
    return text
