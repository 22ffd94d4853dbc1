"""Selects spans of documents by their bytes, without a tokenizer, so that all models get the same spans.

A span consists of consecutive whole words, each with the white space before it. A Chinese character is a separate word.
All common kinds of tokenizers have a token boundary between two such words: tokens of SentencePiece and byte-level BPE
begin with the space, and WordPiece ignores it. Most tokenizers have no token boundary between arbitrary characters.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from pretrainax.config import UserError

_CHINESE = "\u3400-\u9fff\uf900-\ufaff\U00020000-\U00031fff"  # as in BERT's tokenizer
_WORD = re.compile(rf"\s*(?:[{_CHINESE}]|[^\s{_CHINESE}]+)")


class Span(NamedTuple):
    """A span of a document with its left and right context; `left + text + right` is a part of the document."""

    document: int  # index of the document, from 0
    left: str
    text: str
    right: str
    is_start: bool  # True if the document begins with `left`

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


@dataclasses.dataclass(frozen=True)
class SpanChoice:
    """Selects spans of documents at random.

    For each word, random numbers determine whether a span begins before it and whether the current span ends after it.
    Therefore the distribution of span lengths is geometric, similar to the distribution in T5's span corruption. Two
    spans are never adjacent. The first and the last word of a document are never in a span, so that both sides of a
    span have text. The selection depends only on the text, `seed`, `share` and `mean_bytes`.
    """

    share: float = 0.05  # average share of the bytes of a text that are in spans
    mean_bytes: float = 12.0  # mean length of a span in UTF-8 bytes; 12 are about 3 tokens, T5's mean length
    context: int = 512  # maximum bytes of context on each side of a span, in whole words; at least one word
    seed: int = 0

    def __post_init__(self):
        if not 0 < self.share < 1:
            raise UserError(f"share of the bytes in spans is {self.share}, it must be in (0, 1)")
        for name, least in (("mean_bytes", 1), ("context", 1), ("seed", 0)):
            if not getattr(self, name) >= least:
                raise UserError(f"{name} of the spans is {getattr(self, name)}, it must be at least {least}")

    def spans(self, texts: Iterable[str]) -> Iterator[Span]:
        """Yields the spans of each document; documents with less than three words have no spans.

        The spans of a document do not depend on the other documents.
        """
        for number, text in enumerate(texts):
            parts = words(text)
            if len(parts) < 3:
                continue
            ends = np.cumsum([0, *(len(part.encode()) for part in parts)])
            for start, stop in self._word_ranges(text, ends):
                first = min(int(np.searchsorted(ends, ends[start] - self.context)), start - 1)
                last = max(int(np.searchsorted(ends, ends[stop] + self.context, "right")) - 1, stop + 1)
                pieces = (parts[first:start], parts[start:stop], parts[stop:last])
                yield Span(number, *map("".join, pieces), is_start=first == 0)

    def _word_ranges(self, text: str, ends: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yields the index of the first word of each span, and the index of the word after the span.

        Args:
          ends: number of bytes before each word, and of the whole text; [words + 1].
        """
        count = len(ends) - 1
        stop_chance = min(ends[-1] / count / self.mean_bytes, 1.0)
        start_chance = stop_chance * self.share / (1 - self.share)
        digest = hashlib.blake2b(text.encode(), digest_size=8, salt=self.seed.to_bytes(8)).digest()
        begins, stops = np.random.default_rng(int.from_bytes(digest)).random((2, count))
        start, free = None, 1
        for word in range(1, count - 1):
            if start is None and word >= free and begins[word] < start_chance:
                start = word
            if start is not None and (stops[word] < stop_chance or word == count - 2):
                yield start, word + 1
                start, free = None, word + 2


def words(text: str) -> list[str]:
    """Returns the words of a text, each with the white space before it; white space at the end is dropped."""
    return _WORD.findall(text)
