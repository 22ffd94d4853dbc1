"""Adds special tokens around one or more sequences, in the layout of the model's pretraining."""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.tokenization.base import Vocabulary


class SpecialTokenFrame(NamedTuple):
    """The special tokens before, between and after the sequences of a row."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    def count(self, texts: int) -> int:
        """Returns the number of special tokens in a row of `texts` sequences."""
        return len(self.before) + len(self.between) * (texts - 1) + len(self.after)

    def wrap(self, texts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row of sequences with special tokens, and the sequence index of each token; both int32 [n].

        Indices begin at 0. Special tokens between two sequences belong to the first of them.
        """
        pieces, numbers = [np.array(self.before)], [0] * len(self.before)
        for i, text in enumerate(texts):
            end = self.after if i == len(texts) - 1 else self.between
            pieces += [text, np.array(end)]
            numbers += [i] * (len(text) + len(end))
        return np.concatenate(pieces).astype(np.int32), np.array(numbers, np.int32)


def special_token_frame(family: str, vocabulary: Vocabulary) -> SpecialTokenFrame:
    """Returns the special tokens around sequences for a model family and a tokenizer.

    The rows for two sequences a and b:

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
    """Returns the id of the first decoder token in an encoder-decoder: EOS in BART, padding in T5.

    A vocabulary with `cls` is treated as BART's.
    """
    return vocabulary.pad if vocabulary.cls is None else vocabulary.eos


def truncate_longest_first(sizes: Sequence[int], room: int) -> list[int]:
    """Returns the truncated size of each sequence, so that all fit in `room` tokens; the longest lose the most.

    If the room cannot be divided evenly, earlier sequences get one more token.
    """
    level = room
    while sum(min(size, level) for size in sizes) > room:
        level -= 1
    retained = [min(size, level) for size in sizes]
    for i, size in enumerate(sizes):
        retained[i] += retained[i] < size and sum(retained) < room
    return retained
