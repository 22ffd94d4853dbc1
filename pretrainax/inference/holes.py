"""Parses text with holes ("The [MASK] walks in <extra_id_1> park"), and inserts predictions into the holes."""

import re
from collections.abc import Sequence
from typing import Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.tokenization.base import Tokenizer

PLAIN = "[MASK]"  # notation of a hole for all models, in addition to masks and sentinels of the tokenizer
_SENTINEL = re.compile("<extra_id_([0-9]+)>")
_GUARD = "|"  # text before a continuation in `_encode_after`: a character that rarely occurs in longer tokens


class Holes:
    """A text with holes.

    Attributes:
      parts: the strings before, between and after the holes.
      marks: the string that denotes each hole, for example "[MASK]".
    """

    def __init__(self, tokenizer: Tokenizer, text: str):
        """Parses a text; raises UserError if the text has no hole."""
        self.tokenizer = tokenizer
        pieces = re.split(f"({_holes_pattern(tokenizer)})", text)
        self.parts, self.marks = pieces[::2], pieces[1::2]
        if not self.marks:
            raise UserError(
                f"the text has no hole to fill in: write {_mask_of(tokenizer) or PLAIN} where a word is missing"
            )
        self._spellings = tokenizer.spellings()
        self._has_leading_spaces = takes_space(self._spellings)
        self._preserves_spaces = tokenizer.encode("a (a)").tolist() != tokenizer.encode("a(a)").tolist()

    def __len__(self) -> int:
        return len(self.marks)

    def sentinels(self) -> list[int]:
        """Returns the sentinel token id of each hole, for models that fill in spans.

        A hole that is written as a mask gets the next sentinel.

        Raises:
          UserError: the vocabulary has too few sentinels, or the sentinels of the text are not in the order of
            training.
        """
        available = self.tokenizer.vocabulary.sentinels
        for number, mark in enumerate(self.marks):
            sentinel = _SENTINEL.fullmatch(mark)
            if number >= len(available) or (sentinel and int(sentinel[1]) >= len(available)):
                available_text = f"<extra_id_0> to <extra_id_{len(available) - 1}>" if available else "no sentinels"
                raise UserError(f"hole {number + 1} is {mark}, the tokenizer has {available_text}: use fewer holes")
            if sentinel and int(sentinel[1]) != number:
                raise UserError(
                    f"hole {number + 1} is {mark}, it must be <extra_id_{number}> as in training: number the holes "
                    f"from 0, or write {PLAIN} for each"
                )
        return list(available[: len(self)])

    def check_masks(self) -> None:
        """Raises UserError if a hole is written as a sentinel. Use this for models trained to fill in masks only."""
        if sentinel := next(filter(_SENTINEL.fullmatch, self.marks), None):
            raise UserError(f"the text has {sentinel}, which the model was not trained to fill in: write {PLAIN}")

    def ids(self) -> list[np.ndarray]:
        """Returns the token ids of the text before, between and after the holes, tokenized as one continuous text."""
        return ids_between(self.tokenizer, self.parts, [self._has_leading_spaces] * len(self))

    def spelled(self, ids: Sequence[int]) -> str:
        """Decodes token ids to text, keeping the first token's leading space if it has one."""
        pieces = self.tokenizer.special_pieces
        parts = [pieces[i].encode() if i in pieces else self._spellings[i] for i in ids]
        return b"".join(parts).decode("utf-8", "replace")

    def filled(self, spans: Sequence[Sequence[int]]) -> str:
        """Returns the text with each hole replaced by the decoded token ids of its span in `spans`."""
        text = self.parts[0]
        for span, part in zip(spans, self.parts[1:], strict=True):
            text = self._append_span(text, self.spelled(span)) + part
        return text

    def _append_span(self, text: str, span: str) -> str:
        if not self._has_leading_spaces:
            return text + span
        if not span.startswith(" "):  # the span continues the last word
            return text.removesuffix(" ") + span
        has_space = not text or text[-1].isspace()
        # Some tokenizers ignore spaces, and encode "(paris" and "( paris" to the same ids.
        return text + span[1:] if has_space or not (self._preserves_spaces or text[-1].isalnum()) else text + span


def has_hole(tokenizer: Tokenizer, text: str) -> bool:
    """Returns True if a text contains [MASK], the mask of the tokenizer or a sentinel."""
    return re.search(_holes_pattern(tokenizer), text) is not None


def _holes_pattern(tokenizer: Tokenizer) -> str:
    """Returns a regular expression without groups that matches a hole."""
    sentinel = _SENTINEL.pattern.replace("(", "(?:")
    return "|".join([sentinel, *map(re.escape, filter(None, {PLAIN, _mask_of(tokenizer)}))])


def _mask_of(tokenizer: Tokenizer) -> Optional[str]:
    mask = tokenizer.vocabulary.mask
    return None if mask is None else tokenizer.special_pieces[mask]


# --- ids of the text around special tokens ----------------------------------------------------------------------------


def takes_space(spellings: Sequence[bytes]) -> bool:
    """Returns True if tokens can include the space before a word (" park").

    In this case, a hole includes the space before it.
    """
    return any(spelling[:1] == b" " and spelling.strip() for spelling in spellings)


def ids_between(tokenizer: Tokenizer, parts: Sequence[str], trimmed: Sequence[bool]) -> list[np.ndarray]:
    """Tokenizes the strings before, between and after special tokens, as one continuous text.

    Args:
      parts: the strings.
      trimmed: for each special token, whether the token replaces the space before it. There is one fewer special
        token than strings.

    Returns:
      The token ids of each string, int32 [n].
    """
    trimmed_parts = (
        part.removesuffix(" ") if is_trimmed else part for part, is_trimmed in zip(parts, trimmed, strict=False)
    )
    first, *rest = [*trimmed_parts, parts[-1]]
    return [_encode(tokenizer, first), *(_encode_after(tokenizer, part) for part in rest)]


def with_marks(parts: Sequence[np.ndarray], marks: Sequence[int]) -> np.ndarray:
    """Concatenates the token ids of `parts`, with one of the token ids `marks` between adjacent parts; int32 [n]."""
    row = list(parts[0])
    for mark, part in zip(marks, parts[1:], strict=True):
        row += [mark, *part]
    return np.array(row, np.int32)


def _encode_after(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Tokenizes a text that continues another text, without the leading space that some tokenizers add."""
    guard, guarded = tokenizer.encode(_GUARD), tokenizer.encode(_GUARD + text)
    has_guard = len(guard) <= len(guarded) and bool((guarded[: len(guard)] == guard).all())
    return guarded[len(guard) :] if has_guard else _encode(tokenizer, text)


def _encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return tokenizer.encode(text) if text else np.zeros(0, np.int32)
