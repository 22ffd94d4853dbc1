"""The characters of words: what a model reads that has no table of words."""

from collections.abc import Mapping
from typing import Optional

import numpy as np

from pretrainax.config import NUM_CHARACTERS, WORD_LENGTH, ModelConfig
from pretrainax.tokenization.base import Tokenizer

# As bilm-tf numbers them, all one higher, as 0 is no word: bytes from 1, and these.
BEGIN_OF_TEXT, END_OF_TEXT, BEGIN_OF_WORD, END_OF_WORD, BEHIND = range(257, NUM_CHARACTERS)


def character_table(model: ModelConfig, tokenizer: Tokenizer) -> Optional[np.ndarray]:
    """Returns the characters of each id of a tokenizer, [V, C] int16; None for a model that reads none.

    A word has its bytes of UTF-8 between two marks, of a long one the first 48. What no text is, is spelled as it is
    written, but for begin and end of a text, which are characters of their own, and for padding, which has none.

    NOTE So is a word outside of the vocabulary: the ids of a corpus do not tell its characters, which bilm-tf reads.
    """
    if model.recurrent is None:
        return None
    vocabulary = tokenizer.vocabulary
    words = [spelling.removeprefix(b" ") for spelling in tokenizer.spellings()]
    for i, piece in tokenizer.special_pieces.items():
        words[i] = piece.encode()
    table = np.full((vocabulary.size, WORD_LENGTH), BEHIND, np.int16)
    for row, word in zip(table, words, strict=True):
        _spell(row, np.frombuffer(word[: WORD_LENGTH - 2], np.uint8) + 1)
    for i, mark in ((vocabulary.bos, BEGIN_OF_TEXT), (vocabulary.eos, END_OF_TEXT)):
        if i is not None:
            table[i] = BEHIND
            _spell(table[i], np.array([mark]))
    if vocabulary.pad is not None:
        table[vocabulary.pad] = 0
    return table


def _spell(row: np.ndarray, characters: np.ndarray) -> None:
    row[0], row[len(characters) + 1] = BEGIN_OF_WORD, END_OF_WORD
    row[1 : len(characters) + 1] = characters


def spelled(batch: Mapping[str, np.ndarray], table: Optional[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns an example or a batch with the "characters" of its tokens, […, C] int32, where there is a table."""
    if table is None or "characters" in batch:
        return dict(batch)
    return {**batch, "characters": table[batch["tokens"]].astype(np.int32)}
