"""The characters of words: what a model reads that has no table of words."""

import numpy as np

from pretrainax.config import NUM_CHARACTERS, WORD_LENGTH, Recurrent
from pretrainax.data.token_inputs import register_token_input
from pretrainax.tokenization.base import Tokenizer

# As bilm-tf numbers them, all one higher, as 0 is no word: bytes from 1, and these.
BEGIN_OF_TEXT, END_OF_TEXT, BEGIN_OF_WORD, END_OF_WORD, BEHIND = range(257, NUM_CHARACTERS)


@register_token_input(Recurrent, "characters")
def character_table(tokenizer: Tokenizer) -> np.ndarray:
    """Returns the characters of each id of a tokenizer, [V, C] int16.

    A word has its bytes of UTF-8 between two marks, of a long one the first 48. What no text is, is spelled as it is
    written, but for begin and end of a text, which are characters of their own, and for padding, which has none.

    NOTE So is a word outside of the vocabulary: the ids of a corpus do not tell its characters, which bilm-tf reads.
    """
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
