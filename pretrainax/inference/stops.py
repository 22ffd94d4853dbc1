"""Strings that end a text, wherever tokens meet in them."""

from collections.abc import Callable, Sequence
from typing import Optional


def find_stop(text: str, stops: Sequence[str]) -> Optional[int]:
    """Returns where the first of the `stops` begins in a text; None where there is none."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def stopped_after(ids: Sequence[int], known: int, text_of: Callable[[Sequence[int]], str], stops: Sequence[str]) -> int:
    """Returns of how many ids a stop is complete for the first time; 0 where none is.

    Args:
      known: of so many it is known that there is none.
      text_of: what ids are as text.
    """
    if not stops or find_stop(text_of(ids), stops) is None:
        return 0
    return next(n for n in range(known + 1, len(ids) + 1) if find_stop(text_of(ids[:n]), stops) is not None)


def settled(text: str, stops: Sequence[str]) -> str:
    """Returns a text without its last characters that more text may turn into a stop, or into another character."""
    text = text.rstrip("\ufffd")  # the first bytes of a character
    begun = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(begun, default=0)]
