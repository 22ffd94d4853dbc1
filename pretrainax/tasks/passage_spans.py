"""Selects spans of a passage by simple rules, as baselines of extractive question answering."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.data.sources.base import Note

_CERTAIN = 1e6  # score that exceeds any `null_score_diff_threshold`


class Span(NamedTuple):
    """A predicted span of the passage tokens of a window, and its score."""

    first: int  # index of the first token in the passage of the window
    last: int  # index of the last token
    score: float = 1.0  # the answer of a record is the span with the highest score in all windows


def first_words(note: Note, count: int) -> Optional[Span]:
    """Returns the span of the first `count` words of a window; None if the window has no passage token.

    Args:
      note: the note of the window, see `ExtractiveQA.encode`.
    """
    words = list(re.finditer(r"\S+", note["context"]))[:count]
    return _token_span(note, 0, words[-1].end()) if words else None


def similar_sentence(question: str, note: Note, max_tokens: int) -> Optional[Span]:
    """Returns the span of the sentence with the largest share of the question's words; None without passage tokens.

    Args:
      note: the note of a window, see `ExtractiveQA.encode`.
      max_tokens: maximum length of the span; a longer sentence is truncated.
    """
    asked, best = set(_words(question)), None
    for sentence in re.finditer(r"[^.!?]+", note["context"]):
        span = _token_span(note, *sentence.span())
        score = len(asked & set(_words(sentence.group()))) / max(len(asked), 1)
        if span is not None and (best is None or score + 0.01 > best.score):
            best = Span(span.first, min(span.last, span.first + max_tokens - 1), score + 0.01)
    return best


def span_logits(spans: Sequence[Optional[Span]], notes: Sequence[Note]) -> np.ndarray:
    """Builds head outputs [windows, T, 2] that select the given spans, or "no answer" if no window has a span.

    Args:
      spans: the span of each window, or None.
      notes: the notes of the windows, see `ExtractiveQA.encode`.
    """
    length = max(max(note["first"] + len(note["starts"]), note["null"] + 1) for note in notes)
    logits = np.zeros((len(notes), length, 2), np.float32)
    for row, note, span in zip(logits, notes, spans, strict=True):
        row[note["null"]] = _CERTAIN if span is None else -_CERTAIN
        if span is not None:
            row[note["first"] + span.first, 0] = row[note["first"] + span.last, 1] = span.score
    return logits


def _token_span(note: Note, begin: int, end: int) -> Optional[Span]:
    """Returns the span of the tokens that overlap characters `begin` … `end` - 1 of a window; None without tokens."""
    starts, ends = np.array(note["starts"], int), np.array(note["ends"], int)
    tokens = np.flatnonzero((ends > begin) & (starts < end))
    return Span(int(tokens[0]), int(tokens[-1])) if len(tokens) else None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
