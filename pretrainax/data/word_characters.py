"""Computes the characters of words: the input of models without a table of word embeddings."""

import numpy as np

from pretrainax.config import NUM_CHARACTERS, WORD_LENGTH, Recurrent
from pretrainax.data.token_inputs import register_token_input
from pretrainax.tokenization.base import Tokenizer

# Character ids are the ids of bilm-tf plus 1, because 0 means no word: bytes from 1, then these markers.
BEGIN_OF_TEXT, END_OF_TEXT, BEGIN_OF_WORD, END_OF_WORD, BEHIND = range(257, NUM_CHARACTERS)


@register_token_input(Recurrent, "characters")
def character_table(tokenizer: Tokenizer) -> np.ndarray:
    """Returns the character ids of each token id of a tokenizer, [V, C] int16.

    A word has its UTF-8 bytes between two markers, at most the first 48 bytes. Special tokens have the bytes of their
    spelling. There are two exceptions: the begin and the end of a text are single characters, and padding has no
    characters.

    NOTE A word outside the vocabulary has the spelling of the unknown token, because the ids of a corpus do not contain
    its characters. bilm-tf reads the characters of the word.
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
    """Writes the characters of a word, between the begin and the end of the word, into a row of the table."""
    row[0], row[len(characters) + 1] = BEGIN_OF_WORD, END_OF_WORD
    row[1 : len(characters) + 1] = characters
