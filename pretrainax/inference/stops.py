"""Searches generated text for stop strings, which may begin and end within tokens."""

from collections.abc import Callable, Sequence
from typing import Optional


def find_stop(text: str, stops: Sequence[str]) -> Optional[int]:
    """Returns the character index of the earliest stop string in a text, or None if there is none."""
    return min((start for stop in stops if (start := text.find(stop)) >= 0), default=None)


def stopped_after(ids: Sequence[int], known: int, text_of: Callable[[Sequence[int]], str], stops: Sequence[str]) -> int:
    """Returns the smallest n such that the first n ids contain a complete stop string, or 0 if none occurs.

    Args:
      known: number of leading ids that contain no stop string.
      text_of: function that decodes token ids to text.
    """
    if not stops or find_stop(text_of(ids), stops) is None:
        return 0
    return next(n for n in range(known + 1, len(ids) + 1) if find_stop(text_of(ids[:n]), stops) is not None)


def settled(text: str, stops: Sequence[str]) -> str:
    """Returns the prefix of a generated text that no later token can change or remove.

    The result omits final characters that may begin a stop string or a multi-byte character.
    """
    text = text.rstrip("\ufffd")  # incomplete UTF-8 bytes
    partial = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return text[: len(text) - max(partial, default=0)]
