"""Adds special tokens around one or two sequences, in the layout of the model's pretraining."""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.tokenization.base import Vocabulary


class SpecialTokenFrame(NamedTuple):
    """The special tokens before, between and after sequences."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    def count(self, texts: int) -> int:
        """Returns the number of special tokens around `texts` sequences."""
        return len(self.before) + len(self.between) * (texts - 1) + len(self.after)

    def wrap(self, texts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row and, for each token, the index of its sequence from 0; int32 [n] both.

        Special tokens between two sequences belong to the first.
        """
        pieces, numbers = [np.array(self.before)], [0] * len(self.before)
        for i, text in enumerate(texts):
            end = self.after if i == len(texts) - 1 else self.between
            pieces += [text, np.array(end)]
            numbers += [i] * (len(text) + len(end))
        return np.concatenate(pieces).astype(np.int32), np.array(numbers, np.int32)


def special_token_frame(family: str, vocabulary: Vocabulary) -> SpecialTokenFrame:
    """Returns the special tokens around sequences for a model family and a tokenizer.

    BERT        [CLS] a [SEP] b [SEP]
    RoBERTa     <s> a </s> </s> b </s>    also BART's encoder: vocabularies in which cls equals bos
    T5          a </s> b </s>
    a decoder   a </s> b </s>    preceded by bos, if bos differs from eos (LLaMA)
    """
    if family != "decoder" and vocabulary.cls is not None and vocabulary.sep is not None:
        sep = (vocabulary.sep,)
        return SpecialTokenFrame((vocabulary.cls,), 2 * sep if vocabulary.cls == vocabulary.bos else sep, sep)
    separator = () if vocabulary.separator is None else (vocabulary.separator,)
    has_bos = family == "decoder" and vocabulary.bos not in (None, vocabulary.eos)
    return SpecialTokenFrame((vocabulary.bos,) if has_bos and vocabulary.bos is not None else (), separator, separator)


def decoder_start(vocabulary: Vocabulary) -> Optional[int]:
    """Returns the first decoder token of an encoder-decoder: the end token of BART, the padding of T5."""
    return vocabulary.pad if vocabulary.cls is None else vocabulary.eos


def truncate_longest_first(sizes: Sequence[int], room: int) -> list[int]:
    """Returns the number of tokens to retain of each sequence so that all fit in `room`: the longest lose the most.

    Earlier sequences get the tokens that cannot be divided evenly.
    """
    level = room
    while sum(min(size, level) for size in sizes) > room:
        level -= 1
    retained = [min(size, level) for size in sizes]
    for i, size in enumerate(sizes):
        retained[i] += retained[i] < size and sum(retained) < room
    return retained
