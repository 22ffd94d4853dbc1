"""Computes the character ids of words, which are the input of models without a word embedding table."""

import numpy as np

from pretrainax.config import NUM_CHARACTERS, WORD_LENGTH, Recurrent
from pretrainax.data.token_inputs import register_token_input
from pretrainax.tokenization.base import Tokenizer

# Character ids are the ids of bilm-tf plus 1: 0 for no word, then the bytes from 1, then these markers.
BEGIN_OF_TEXT, END_OF_TEXT, BEGIN_OF_WORD, END_OF_WORD, BEHIND = range(257, NUM_CHARACTERS)


@register_token_input(Recurrent, "characters")
def character_table(tokenizer: Tokenizer) -> np.ndarray:
    """Returns the character ids of each token id of a tokenizer, [V, C] int16.

    A word is represented by its first 48 UTF-8 bytes (or fewer) between two markers. Special tokens are spelled out in
    the same way, with two exceptions: the beginning and the end of a text are single characters each, and padding has
    no characters.

    NOTE A word outside the vocabulary is spelled like the unknown token, because a corpus stores only token ids.
    bilm-tf reads the word's own characters instead.
    """
    vocabulary = tokenizer.vocabulary
    words = [spelling.removeprefix(b" ") for spelling in tokenizer.spellings()]
    for token_id, piece in tokenizer.special_pieces.items():
        words[token_id] = piece.encode()
    table = np.full((vocabulary.size, WORD_LENGTH), BEHIND, np.int16)
    for row, word in zip(table, words, strict=True):
        _write_characters(row, np.frombuffer(word[: WORD_LENGTH - 2], np.uint8) + 1)
    for token_id, marker in ((vocabulary.bos, BEGIN_OF_TEXT), (vocabulary.eos, END_OF_TEXT)):
        if token_id is not None:
            table[token_id] = BEHIND
            _write_characters(table[token_id], np.array([marker]))
    if vocabulary.pad is not None:
        table[vocabulary.pad] = 0
    return table


def _write_characters(row: np.ndarray, characters: np.ndarray) -> None:
    """Writes a word's characters into a row of the table, between the begin-of-word and end-of-word markers."""
    row[0], row[len(characters) + 1] = BEGIN_OF_WORD, END_OF_WORD
    row[1 : len(characters) + 1] = characters
