"""Chooses spans of texts by their bytes, the same for every model: no tokenizer is asked.

A span is a run of whole words, each with the white space before it; a Chinese character is a word by itself. Between
two such words every kind of tokenizer has a boundary: pieces of SentencePiece and of byte-level BPE begin with the
space, and WordPiece does not see it. Between any two characters would not do: most tokenizers have no boundary there.
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
    """A span of a document, and what may be read of its surroundings; the three joined are a part of the document."""

    document: int  # its number
    left: str
    text: str
    right: str
    is_start: bool  # `left` begins the document

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


@dataclasses.dataclass(frozen=True)
class SpanChoice:
    """Chooses spans; which ones follows from the text, `seed`, `share` and `mean_bytes` alone.

    Word by word, a coin says whether a span begins, and within one whether it ends after this word: lengths are
    geometric, as those of T5's span corruption nearly are. Two spans do not touch; the first and the last word of a
    document are in none, so that there is something on both sides.
    """

    share: float = 0.05  # of the text is in spans, on average
    mean_bytes: float = 12.0  # of a span, of UTF-8; 12 are about the 3 tokens that T5 is trained on
    context: int = 512  # bytes of whole words that may be read on each side of a span
    seed: int = 0

    def __post_init__(self):
        if not 0 < self.share < 1:
            raise UserError(f"share of the bytes that are in spans is {self.share}, it must be in (0, 1)")
        for name, least in (("mean_bytes", 1), ("context", 1), ("seed", 0)):
            if not getattr(self, name) >= least:
                raise UserError(f"{name} of the spans is {getattr(self, name)}, it must be at least {least}")

    def spans(self, texts: Iterable[str]) -> Iterator[Span]:
        """Yields the spans of documents, each told for itself; none of a document of less than three words."""
        for number, text in enumerate(texts):
            parts = words(text)
            if len(parts) < 3:
                continue
            ends = np.cumsum([0, *(len(part.encode()) for part in parts)])
            for start, stop in self._places(text, ends):
                first = min(int(np.searchsorted(ends, ends[start] - self.context)), start - 1)
                last = max(int(np.searchsorted(ends, ends[stop] + self.context, "right")) - 1, stop + 1)
                pieces = (parts[first:start], parts[start:stop], parts[stop:last])
                yield Span(number, *map("".join, pieces), is_start=first == 0)

    def _places(self, text: str, ends: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yields the first word of each span and the one after it. ends: [words + 1], bytes before each word."""
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
    """Returns the words of a text, each with the white space before it: joined they are the text without its end's."""
    return _WORD.findall(text)
