"""Finds words in a row of tokens: where words start, words from a word list, and words of similar meaning."""

import io
import os
from collections.abc import Iterator
from typing import Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.files.json_files import read_object
from pretrainax.files.regular_files import read_bytes
from pretrainax.storage.places import local_path
from pretrainax.tokenization.base import Tokenizer


class Words:
    """Finds the starts of words in a row of tokens, for any tokenizer.

    `Tokenizer.word_edges` defines words; each Chinese character is a word. With a word list, consecutive tokens that
    spell a word in the list count as one word; the search runs from left to right and takes the longest match.
    """

    def __init__(self, tokenizer: Tokenizer, word_list: Optional[str] = None):
        """Reads the word list, if there is one.

        word_list: path of a file with one word per line, or None. Anything after the first whitespace in a line is
        ignored (jieba's lists have frequencies there).
        """
        self._begins_word, self._ends_word = tokenizer.word_edges
        self._size = tokenizer.vocabulary.size
        # The list as an automaton: state * size + token -> the next state; state 0 is the start of a word.
        self._transitions: dict[int, int] = {}
        self._final_states: set[int] = set()
        if word_list is not None:
            for word in _read_lines(word_list, "config.objective.mask_unit.word_list"):
                for ids in spellings(tokenizer, word.split()[0]):
                    self._add_word(ids)

    def starts(self, tokens: np.ndarray) -> np.ndarray:
        """Returns which tokens start a word, [n] int32 -> [n] bool; the first token always does."""
        starts = self._begins_word[tokens]
        starts[1:] |= self._ends_word[tokens[:-1]]
        starts[:1] = True
        if self._transitions:
            self._join_words(tokens.tolist(), starts)
        return starts

    def _add_word(self, ids: tuple[int, ...]) -> None:
        """Adds the token ids of a word to the automaton that recognizes the words of the list."""
        state = 0
        for token in ids:
            state = self._transitions.setdefault(state * self._size + token, len(self._transitions) + 1)
        self._final_states.add(state)

    def _join_words(self, tokens: list[int], starts: np.ndarray) -> None:
        """Sets `starts` to False, in place, for all tokens of a word in the word list except its first token."""
        next_state, final_states, size, end = self._transitions.get, self._final_states, self._size, len(tokens)
        may_end = [*starts.tolist(), True]
        position = 0
        while position < end:
            longest_end = match_end = position
            state = next_state(tokens[position]) if may_end[position] else None
            while state is not None:
                match_end += 1
                if state in final_states and may_end[match_end]:
                    longest_end = match_end
                state = next_state(state * size + tokens[match_end]) if match_end < end else None
            if longest_end > position + 1:
                starts[position + 1 : longest_end] = False
            position = max(longest_end, position + 1)


class SimilarWords:
    """Maps a word's tokens to words of similar meaning that have the same number of tokens."""

    def __init__(self, tokenizer: Tokenizer, path: str):
        """Reads the similar words; raises UserError if no word has a similar word with the same number of tokens.

        path: a JSON file, {word: [similar word, ...]}.
        """
        self._similar: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for word, similar_words in _read_table(path).items():
            rows = zip(*(spellings(tokenizer, w) for w in (word, *similar_words)), strict=True)
            for ids, *candidates in dict.fromkeys(rows):  # both spellings of a word may be the same
                same_length = [other for other in candidates if len(other) == len(ids) and other != ids]
                if ids and same_length:
                    self._similar.setdefault(ids, []).extend(same_length)
        if not self._similar:
            raise UserError(
                f"config.objective.similar_words: no word of {path} has a similar word with an equal number of "
                "tokens in this tokenizer"
            )

    def similar_to(self, ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the token ids of each word similar to the word with token ids `ids`, or [] if there are none."""
        return self._similar.get(ids, [])


def spellings(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """Returns the token ids of a word at the start of a text and after a space, which may be the same."""
    bare, spaced = (tuple(ids.tolist()) for ids in tokenizer.encode_batch([word, f" {word}"]))
    space_ids = tokenizer.encode(" ").tolist()
    if len(space_ids) == 1 and bare[:1] == tuple(space_ids):  # SentencePiece may add a space at the start of a text
        bare = bare[1:]
    return [bare, spaced]


def _read_lines(path: str, field: str) -> Iterator[str]:
    """Yields the nonblank lines of a text file; raises UserError if a line is not UTF-8."""
    for number, line in enumerate(io.BytesIO(read_bytes(local_path(os.path.expanduser(path)))), start=1):
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise UserError(f"{field}: {path}:{number}: not UTF-8 ({e.reason})") from e
        if not text.isspace():
            yield text


def _read_table(path: str) -> dict[str, list[str]]:
    """Reads a JSON file that maps each word to its similar words; raises UserError if the file is not valid."""
    field = "config.objective.similar_words"
    try:
        table = read_object(os.path.expanduser(path))
    except UserError as e:
        raise UserError(f"{field}: {e}; it must be a JSON object, word -> similar words") from e
    for word, similar_words in table.items():
        if not isinstance(similar_words, list) or not all(
            isinstance(similar_word, str) for similar_word in similar_words
        ):
            raise UserError(f"{field}: {path} has {similar_words!r} for {word!r}, it must be a list of words")
    return table
