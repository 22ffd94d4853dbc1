"""Takes off what is no part of a text: a byte-order mark before it, and the carriage returns of Windows' line ends."""

import collections
from typing import Any, TypeVar

MARKS, RETURNS = "byte-order marks", "carriage returns"  # how they are counted

Text = TypeVar("Text", str, bytearray)
_OF_STR: Any = ("\ufeff", "\r\n", "\n", "\r")
_OF_BYTES: Any = (b"\xef\xbb\xbf", b"\r\n", b"\n", b"\r")


def plain(text: Text, found: collections.Counter) -> Text:
    """Returns the text, as a str or as UTF-8, with line ends of "\\n"; counts in `found` what was taken off."""
    mark, windows, line, carriage = _OF_STR if isinstance(text, str) else _OF_BYTES
    if text.startswith(mark):
        found[MARKS] += 1
        text = text[len(mark) :]
    if windows in text or text.endswith(carriage):
        found[RETURNS] += text.count(windows) + text.endswith(carriage)
        text = text.replace(windows, line).removesuffix(carriage)  # at its end where it was cut within a line end
    return text
