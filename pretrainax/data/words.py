"""Finds words in a row of tokens: the starts of words, the words of a list, and words of similar meaning."""

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

    `Tokenizer.word_edges` defines words; each Chinese character is a word. With a list of words, tokens that spell a
    word of the list are one word. The search goes from left to right and takes the longest match.
    """

    def __init__(self, tokenizer: Tokenizer, word_list: Optional[str] = None):
        """Reads the list of words, if there is one.

        word_list: a file with one word per line. Text after white space is ignored (jieba's lists have frequencies
        there).
        """
        self._begins, self._ends = tokenizer.word_edges
        self._size = tokenizer.vocabulary.size
        # The list as an automaton: state * size + token -> the next state; state 0 is the start of a word.
        self._next: dict[int, int] = {}
        self._complete: set[int] = set()
        if word_list is not None:
            for word in _lines(word_list, "config.objective.mask_unit.word_list"):
                for ids in spellings(tokenizer, word.split()[0]):
                    self._add(ids)

    def starts(self, tokens: np.ndarray) -> np.ndarray:
        """Returns True for each token that starts a word, [n] int32 -> [n] bool; the first token starts a word."""
        starts = self._begins[tokens]
        starts[1:] |= self._ends[tokens[:-1]]
        starts[:1] = True
        if self._next:
            self._join(tokens.tolist(), starts)
        return starts

    def _add(self, ids: tuple[int, ...]) -> None:
        """Adds the token ids of a word to the automaton."""
        state = 0
        for token in ids:
            state = self._next.setdefault(state * self._size + token, len(self._next) + 1)
        self._complete.add(state)

    def _join(self, tokens: list[int], starts: np.ndarray) -> None:
        """Sets `starts` to False for the tokens inside words of the list, in place."""
        step, complete, size, end = self._next.get, self._complete, self._size, len(tokens)
        may_end = [*starts.tolist(), True]
        position = 0
        while position < end:
            longest = reached = position
            state = step(tokens[position]) if may_end[position] else None
            while state is not None:
                reached += 1
                if state in complete and may_end[reached]:
                    longest = reached
                state = step(state * size + tokens[reached]) if reached < end else None
            if longest > position + 1:
                starts[position + 1 : longest] = False
            position = max(longest, position + 1)


class SimilarWords:
    """Maps the tokens of a word to words of similar meaning with the same number of tokens."""

    def __init__(self, tokenizer: Tokenizer, path: str):
        """Reads the similar words; raises UserError if no word has a similar word with the same number of tokens.

        path: a JSON file, {word: [similar word, ...]}.
        """
        self._similar: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for word, others in _table(path).items():
            for ids, *candidates in zip(*(spellings(tokenizer, w) for w in (word, *others)), strict=True):
                same_length = [other for other in candidates if len(other) == len(ids) and other != ids]
                if ids and same_length:
                    self._similar[ids] = same_length
        if not self._similar:
            raise UserError(
                f"config.objective.similar_words: no word of {path} has a similar word with an equal number of "
                "tokens in this tokenizer"
            )

    def similar_to(self, ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the token ids of each word that is similar to the word with token ids `ids`; [] if there are none."""
        return self._similar.get(ids, [])


def spellings(tokenizer: Tokenizer, word: str) -> list[tuple[int, ...]]:
    """Returns two tokenizations of a word: at the start of a text, and after a space. They may be equal."""
    bare, spaced = (tuple(ids.tolist()) for ids in tokenizer.encode_batch([word, f" {word}"]))
    space_ids = tokenizer.encode(" ").tolist()
    if len(space_ids) == 1 and bare[:1] == tuple(space_ids):  # SentencePiece may add a space at the start of a text
        bare = bare[1:]
    return [bare, spaced]


def _lines(path: str, field: str) -> Iterator[str]:
    """Yields the lines of a text file that are not white space; raises UserError for a line that is not UTF-8."""
    for number, line in enumerate(io.BytesIO(read_bytes(local_path(os.path.expanduser(path)))), start=1):
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise UserError(f"{field}: {path}:{number}: not UTF-8 ({e.reason})") from e
        if not text.isspace():
            yield text


def _table(path: str) -> dict[str, list[str]]:
    """Returns the similar words of each word from a JSON file; raises UserError if the file has a different form."""
    field = "config.objective.similar_words"
    try:
        table = read_object(os.path.expanduser(path))
    except UserError as e:
        raise UserError(f"{field}: {e}; it must be a JSON object, word -> similar words") from e
    for word, others in table.items():
        if not isinstance(others, list) or not all(isinstance(other, str) for other in others):
            raise UserError(f"{field}: {path} has {others!r} for {word!r}, it must be a list of words")
    return table
