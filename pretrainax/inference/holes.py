"""Reads texts with holes, "The [MASK] walks in <extra_id_1> park", and puts into them what a model says."""

import re
from collections.abc import Sequence
from typing import Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.tokenization.base import Tokenizer

PLAIN = "[MASK]"  # understood for every model, however its tokenizer writes a mask
_SENTINEL = re.compile("<extra_id_([0-9]+)>")
_GUARD = "|"  # hardly ever a part of a longer piece


class Holes:
    """The text between the holes, as it was written and as ids, and how each hole is written."""

    def __init__(self, tokenizer: Tokenizer, text: str):
        """Raises UserError where `text` has no hole."""
        self.tokenizer = tokenizer
        split = re.split(f"({_written(tokenizer)})", text)
        self.parts, self.marks = split[::2], split[1::2]
        if not self.marks:
            raise UserError(
                f"the text has no hole to fill in: write {_own(tokenizer) or PLAIN} where a word is missing"
            )
        self._spellings = tokenizer.spellings()
        self._takes_space = takes_space(self._spellings)
        self._keeps_space = tokenizer.encode("a (a)").tolist() != tokenizer.encode("a(a)").tolist()

    def __len__(self) -> int:
        return len(self.marks)

    def sentinels(self) -> list[int]:
        """Returns the id of each hole for a model that fills in spans: a mask is the next sentinel.

        Raises:
          UserError: sentinels that the vocabulary lacks, or in another order than in training.
        """
        known = self.tokenizer.vocabulary.sentinels
        for number, mark in enumerate(self.marks):
            named = _SENTINEL.fullmatch(mark)
            if number >= len(known) or (named and int(named[1]) >= len(known)):
                has = f"<extra_id_0> to <extra_id_{len(known) - 1}>" if known else "no sentinels"
                raise UserError(f"hole {number + 1} is {mark}, the tokenizer has {has}: take fewer holes")
            if named and int(named[1]) != number:
                raise UserError(
                    f"hole {number + 1} is {mark}, it must be <extra_id_{number}>, as the model was trained: number "
                    f"the holes from 0, or write {PLAIN} for each"
                )
        return list(known[: len(self)])

    def check_masks(self) -> None:
        """Raises UserError where a hole is a sentinel, and the model fills in masks."""
        if named := next(filter(_SENTINEL.fullmatch, self.marks), None):
            raise UserError(f"the text has {named}, which the model was not trained to fill in: write {PLAIN} instead")

    def ids(self) -> list[np.ndarray]:
        """Returns the ids of the text before, between and after the holes, as of one text: one more than holes."""
        return ids_between(self.tokenizer, self.parts, [self._takes_space] * len(self))

    def spelled(self, ids: Sequence[int]) -> str:
        """Returns what ids write, with the space before the first word where the tokenizer has one there."""
        pieces = self.tokenizer.special_pieces
        parts = [pieces[i].encode() if i in pieces else self._spellings[i] for i in ids]
        return b"".join(parts).decode("utf-8", "replace")

    def filled(self, spans: Sequence[Sequence[int]]) -> str:
        """Returns the text with the ids of each span in its hole, and all else as it was written."""
        text = self.parts[0]
        for span, part in zip(spans, self.parts[1:], strict=True):
            text = self._joined(text, self.spelled(span)) + part
        return text

    def _joined(self, text: str, said: str) -> str:
        if not self._takes_space:
            return text + said
        if not said.startswith(" "):  # it goes on where the text ends
            return text.removesuffix(" ") + said
        has_space = not text or text[-1].isspace()
        # Without spaces among its ids a tokenizer writes "(paris" and "( paris" alike.
        return text + said[1:] if has_space or not (self._keeps_space or text[-1].isalnum()) else text + said


def has_hole(tokenizer: Tokenizer, text: str) -> bool:
    """Returns True if something in a text stands for what is missing."""
    return re.search(_written(tokenizer), text) is not None


def _written(tokenizer: Tokenizer) -> str:
    """Returns how holes are written, as a regular expression without groups."""
    sentinel = _SENTINEL.pattern.replace("(", "(?:")
    return "|".join([sentinel, *map(re.escape, filter(None, {PLAIN, _own(tokenizer)}))])


def _own(tokenizer: Tokenizer) -> Optional[str]:
    mask = tokenizer.vocabulary.mask
    return None if mask is None else tokenizer.special_pieces[mask]


# --- the ids of text around what is no text ---------------------------------------------------------------------------


def takes_space(spellings: Sequence[bytes]) -> bool:
    """Returns True if the space before a hole is of what goes into it, as " park" is one piece."""
    return any(spelling[:1] == b" " and spelling.strip() for spelling in spellings)


def ids_between(tokenizer: Tokenizer, parts: Sequence[str], trimmed: Sequence[bool]) -> list[np.ndarray]:
    """Returns the ids of the parts of a text before, between and after marks, as of one text.

    Args:
      trimmed: of each mark, whether it takes the space before it: one fewer than parts.
    """
    spaced = (part.removesuffix(" ") if trim else part for part, trim in zip(parts, trimmed, strict=False))
    first, *others = [*spaced, parts[-1]]
    return [_encode(tokenizer, first), *(_encode_after(tokenizer, part) for part in others)]


def with_marks(parts: Sequence[np.ndarray], marks: Sequence[int]) -> np.ndarray:
    """Returns the ids of a text, int32 [n], of its parts with a mark between each two."""
    row = list(parts[0])
    for mark, part in zip(marks, parts[1:], strict=True):
        row += [mark, *part]
    return np.array(row, np.int32)


def _encode_after(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Returns the ids of a text that goes on after something: without the space that some tokenizers put first."""
    guard, guarded = tokenizer.encode(_GUARD), tokenizer.encode(_GUARD + text)
    follows = len(guard) <= len(guarded) and bool((guarded[: len(guard)] == guard).all())
    return guarded[len(guard) :] if follows else _encode(tokenizer, text)


def _encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return tokenizer.encode(text) if text else np.zeros(0, np.int32)
