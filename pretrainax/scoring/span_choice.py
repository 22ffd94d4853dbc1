"""Selects spans of documents by bytes, without a tokenizer, so that all models are scored on the same spans.

A span consists of consecutive whole words, each with the white space before it. Each Chinese character is a separate
word. All common kinds of tokenizers have a token boundary between two of these words: tokens of SentencePiece and
byte-level BPE begin with the space, and WordPiece ignores spaces. Spans of arbitrary characters would not end at token
boundaries.
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
    """A span of a document with its left and right context; `left + text + right` is a substring of the document."""

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
    """Selects random spans of documents.

    For each word, random numbers determine whether a span begins before the word, and whether the current span ends
    after the word. Span lengths are therefore geometrically distributed, similar to T5's span corruption. Two spans are
    never adjacent. The first and the last word of a document are never in a span, so that each span has left and right
    context. The selection depends only on the text, `seed`, `share` and `mean_bytes`.
    """

    share: float = 0.05  # average fraction of the bytes of a text that are in spans
    mean_bytes: float = 12.0  # mean length of a span in UTF-8 bytes; 12 are about 3 tokens, T5's mean length
    context: int = 512  # maximum bytes of left and of right context, in whole words; at least one word each
    seed: int = 0

    def __post_init__(self):
        if not 0 < self.share < 1:
            raise UserError(f"share of the bytes in spans is {self.share}, it must be in (0, 1)")
        for name, minimum in (("mean_bytes", 1), ("context", 1), ("seed", 0)):
            if not getattr(self, name) >= minimum:
                raise UserError(f"{name} of the spans is {getattr(self, name)}, it must be at least {minimum}")

    def spans(self, texts: Iterable[str]) -> Iterator[Span]:
        """Yields the spans of each document; documents with fewer than three words have no spans.

        The spans of a document do not depend on the other documents.
        """
        for number, text in enumerate(texts):
            text_words = words(text)
            if len(text_words) < 3:
                continue
            offsets = np.cumsum([0, *(len(word.encode()) for word in text_words)])
            for start, stop in self._word_ranges(text, offsets):
                context_start = min(int(np.searchsorted(offsets, offsets[start] - self.context)), start - 1)
                context_stop = max(int(np.searchsorted(offsets, offsets[stop] + self.context, "right")) - 1, stop + 1)
                word_lists = (text_words[context_start:start], text_words[start:stop], text_words[stop:context_stop])
                yield Span(number, *map("".join, word_lists), is_start=context_start == 0)

    def _word_ranges(self, text: str, offsets: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yields (index of the first word, index after the last word) for each span.

        Args:
          offsets: number of bytes before each word, then the number of bytes of all words; [words + 1].
        """
        num_words = len(offsets) - 1
        stop_chance = min(offsets[-1] / num_words / self.mean_bytes, 1.0)
        start_chance = stop_chance * self.share / (1 - self.share)
        digest = hashlib.blake2b(text.encode(), digest_size=8, salt=self.seed.to_bytes(8)).digest()
        start_draws, stop_draws = np.random.default_rng(int.from_bytes(digest)).random((2, num_words))
        start, next_allowed = None, 1
        for word in range(1, num_words - 1):
            if start is None and word >= next_allowed and start_draws[word] < start_chance:
                start = word
            if start is not None and (stop_draws[word] < stop_chance or word == num_words - 2):
                yield start, word + 1
                start, next_allowed = None, word + 2


def words(text: str) -> list[str]:
    """Splits a text into words, each with the white space before it; trailing white space is dropped."""
    return _WORD.findall(text)
