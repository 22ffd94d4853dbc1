"""Adds special tokens around one or more sequences, in the layout of the model's pretraining."""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.tokenization.base import Vocabulary


class SpecialTokenFrame(NamedTuple):
    """The special tokens before, between and after the sequences of one row."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    def count(self, texts: int) -> int:
        """Returns how many special tokens a row of `texts` sequences has."""
        return len(self.before) + len(self.between) * (texts - 1) + len(self.after)

    def wrap(self, texts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Adds the special tokens to the sequences of a row.

        Special tokens between two sequences belong to the first of the two.

        Returns:
          The tokens of the row, and for each token the 0-based index of its sequence; both are int32 [n].
        """
        pieces, sequence_indices = [np.array(self.before)], [0] * len(self.before)
        for i, text in enumerate(texts):
            special_ids = self.after if i == len(texts) - 1 else self.between
            pieces += [text, np.array(special_ids)]
            sequence_indices += [i] * (len(text) + len(special_ids))
        return np.concatenate(pieces).astype(np.int32), np.array(sequence_indices, np.int32)


def special_token_frame(family: str, vocabulary: Vocabulary) -> SpecialTokenFrame:
    """Returns the special tokens that a model family puts in a row, taken from a vocabulary.

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
    """Returns the size of each sequence after truncating the longest, so that they fit in `room` tokens together.

    The longest sequences are truncated to the same size; if that leaves a remainder, earlier sequences keep one more
    token.
    """
    limit = room
    while sum(min(size, limit) for size in sizes) > room:
        limit -= 1
    truncated = [min(size, limit) for size in sizes]
    for i, size in enumerate(sizes):
        truncated[i] += truncated[i] < size and sum(truncated) < room
    return truncated
