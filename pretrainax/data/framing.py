"""Adds special tokens around one or more sequences, in the layout of the model's pretraining."""

from collections.abc import Sequence
from typing import Optional

from pretrainax.tokenization.base import Vocabulary
from pretrainax.tokenization.frames import RowFrame, SpecialTokenFrame


def special_token_frame(family: str, vocabulary: Vocabulary) -> SpecialTokenFrame:
    """Returns the special tokens of a row: the tokenizer's own (`Vocabulary.frame`), or else those of a model family.

    The rows of a model family for two sequences a and b:

        BERT        [CLS] a [SEP] b [SEP]
        RoBERTa     <s> a </s> </s> b </s>    also BART's encoder: vocabularies in which cls equals bos
        T5          a </s> b </s>
        a decoder   a </s> b </s>    preceded by bos, if bos differs from eos (LLaMA)
    """
    if vocabulary.frame is not None:
        return vocabulary.frame
    if family != "decoder" and vocabulary.cls is not None and vocabulary.sep is not None:
        cls, sep = (vocabulary.cls,), (vocabulary.sep,)
        between = 2 * sep if vocabulary.cls == vocabulary.bos else sep
        return SpecialTokenFrame(RowFrame(cls, (), sep), RowFrame(cls, between, sep))
    separator = () if vocabulary.separator is None else (vocabulary.separator,)
    has_bos = family == "decoder" and vocabulary.bos not in (None, vocabulary.eos)
    bos = (vocabulary.bos,) if has_bos and vocabulary.bos is not None else ()
    return SpecialTokenFrame(RowFrame(bos, (), separator), RowFrame(bos, separator, separator))


def decoder_start(vocabulary: Vocabulary) -> Optional[int]:
    """Returns the id of the first decoder token in an encoder-decoder.

    This is `Vocabulary.decoder_start`, or else EOS in BART and padding in T5. A vocabulary with `cls` is treated as
    BART's.
    """
    if vocabulary.decoder_start is not None:
        return vocabulary.decoder_start
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
