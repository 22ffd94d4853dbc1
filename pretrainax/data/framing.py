"""Special tokens around the texts that a model reads, as they stood in its pretraining: one text, or two."""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.tokenization.base import Vocabulary


class Frame(NamedTuple):
    """The special tokens before, between and after texts."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    def count(self, texts: int) -> int:
        """Returns how many there are around so many texts."""
        return len(self.before) + len(self.between) * (texts - 1) + len(self.after)

    def around(self, texts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row, and of each token the number of its text, from 0: int32 [n] both. What stands between two
        is of the first."""
        pieces, numbers = [np.array(self.before)], [0] * len(self.before)
        for i, text in enumerate(texts):
            end = self.after if i == len(texts) - 1 else self.between
            pieces += [text, np.array(end)]
            numbers += [i] * (len(text) + len(end))
        return np.concatenate(pieces).astype(np.int32), np.array(numbers, np.int32)


def frame_of(family: str, vocabulary: Vocabulary) -> Frame:
    """Returns what stands around texts for a model of a family, with such a tokenizer.

    BERT        [CLS] a [SEP] b [SEP]
    RoBERTa     <s> a </s> </s> b </s>    BART too, in its encoder: the vocabularies whose [CLS] is their begin
    T5          a </s> b </s>
    a decoder   a </s> b </s>    after a begin of text, where that is not the end of one (LLaMA)
    """
    if family != "decoder" and vocabulary.cls is not None and vocabulary.sep is not None:
        sep = (vocabulary.sep,)
        return Frame((vocabulary.cls,), 2 * sep if vocabulary.cls == vocabulary.bos else sep, sep)
    separator = () if vocabulary.separator is None else (vocabulary.separator,)
    begins = family == "decoder" and vocabulary.bos not in (None, vocabulary.eos)
    return Frame((vocabulary.bos,) if begins and vocabulary.bos is not None else (), separator, separator)


def decoder_start(vocabulary: Vocabulary) -> Optional[int]:
    """Returns what the decoder of an encoder-decoder reads first: the end of BART, the padding of T5."""
    return vocabulary.pad if vocabulary.cls is None else vocabulary.eos


def longest_first(sizes: Sequence[int], room: int) -> list[int]:
    """Returns how many tokens of each text are kept where they have room for so many: of the longest the most go.

    The first texts have what cannot be shared equally.
    """
    level = room
    while sum(min(size, level) for size in sizes) > room:
        level -= 1
    kept = [min(size, level) for size in sizes]
    for i, size in enumerate(sizes):
        kept[i] += kept[i] < size and sum(kept) < room
    return kept
