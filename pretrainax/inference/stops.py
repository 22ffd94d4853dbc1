"""Searches generated text for stop strings, which may begin and end within tokens."""

from collections.abc import Callable, Sequence
from typing import Optional


def find_stop(text: str, stops: Sequence[str]) -> Optional[int]:
    """Returns the index of the first character of the first stop string in a text; None if there is no stop string."""
    return min((start for stop in stops if (start := text.find(stop)) >= 0), default=None)


def stopped_after(ids: Sequence[int], known: int, text_of: Callable[[Sequence[int]], str], stops: Sequence[str]) -> int:
    """Returns the smallest number of ids whose text contains a complete stop string; 0 if no stop string occurs.

    Args:
      known: number of ids that are known to contain no stop string.
      text_of: decodes ids to text.
    """
    if not stops or find_stop(text_of(ids), stops) is None:
        return 0
    return next(n for n in range(known + 1, len(ids) + 1) if find_stop(text_of(ids[:n]), stops) is not None)


def settled(text: str, stops: Sequence[str]) -> str:
    """Returns the part of a text that further tokens cannot change or remove.

    Final characters are removed if they may be the start of a stop string or of a multi-byte character.
    """
    text = text.rstrip("\ufffd")  # incomplete UTF-8 bytes
    partial = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(partial, default=0)]
