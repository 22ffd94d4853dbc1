"""Removes byte-order marks and the carriage returns of Windows line ends from text."""

import collections
from typing import Any, TypeVar

MARKS, RETURNS = "byte-order marks", "carriage returns"  # names of the counters

Text = TypeVar("Text", str, bytearray)
_OF_STR: Any = ("\ufeff", "\r\n", "\n", "\r")
_OF_BYTES: Any = (b"\xef\xbb\xbf", b"\r\n", b"\n", b"\r")


def normalize_line_ends(text: Text, found: collections.Counter) -> Text:
    """Returns a text without its byte-order mark, and with "\\n" at the ends of its lines.

    Args:
      text: a str, or a bytearray of UTF-8.
      found: the removed byte-order marks and carriage returns are added to this counter.
    """
    mark, windows, line, carriage = _OF_STR if isinstance(text, str) else _OF_BYTES
    if text.startswith(mark):
        found[MARKS] += 1
        text = text[len(mark) :]
    if windows in text or text.endswith(carriage):
        found[RETURNS] += text.count(windows) + text.endswith(carriage)
        # A text may end inside of a line end, after its carriage return.
        text = text.replace(windows, line).removesuffix(carriage)
    return text
