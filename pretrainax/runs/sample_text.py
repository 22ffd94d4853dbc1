"""Formats samples of a model as lines of whole words, with predicted words in brackets."""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pretrainax.data.batch import Example, is_encoder_decoder
from pretrainax.tokenization.base import Tokenizer

MAX_TOKENS = 80  # maximum number of tokens per sample
_CONTEXT = 12  # number of words to display before and after a predicted word


class Cell(NamedTuple):
    """One or more positions of a sequence, with their predicted and true token ids."""

    guess: list[int]
    truth: list[int]
    is_predicted: bool = True
    probability: float = 1.0  # probability of the prediction; for several tokens, the lowest probability


class SampleText:
    """Formats token ids as one line of whole words, without most special tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self.vocabulary, self.pieces = tokenizer.vocabulary, tokenizer.special_pieces
        self.spellings = tokenizer.spellings()
        self.begins, self.ends = tokenizer.word_edges
        self.tokenizer = tokenizer
        vocabulary = tokenizer.vocabulary
        self.displayed_specials = {vocabulary.unk, *vocabulary.sentinels}

    def line(self, ids: Iterable[int]) -> str:
        """Decodes token ids to one line, with documents separated by "¶"."""
        return one_line(self._text(ids))

    def cells(self, cells: Sequence[Cell]) -> str:
        """Decodes cells to one line, with predicted words in brackets."""
        return one_line("".join(map(self._word, self._group_words(cells))))

    def excerpt(self, cells: Sequence[Cell]) -> tuple[float, str]:
        """Finds the most confident predicted word; returns its probability and a line that shows it in context.

        Only predictions of two or more letters count as words. Returns (0, "") if there is no such word.
        """
        words = self._group_words(cells)
        confidence = {
            i: min(cell.probability for cell in word if cell.is_predicted)
            for i, word in enumerate(words)
            if any(cell.is_predicted for cell in word) and self._is_word(i for cell in word for i in cell.guess)
        }
        if not confidence:
            return 0.0, ""
        best = max(confidence, key=confidence.__getitem__)
        start = max(best - _CONTEXT, 0)
        parts = [self._word(word, i != best) for i, word in enumerate(words[start : best + _CONTEXT + 1], start)]
        return confidence[best], re.sub(r"(\[…\] ?)+(?=\[…\])", "", one_line("".join(parts)))

    def _is_word(self, ids: Iterable[int]) -> bool:
        text = self._text(ids).strip()
        return text.isalpha() and len(text) > 1

    def _group_words(self, cells: Sequence[Cell]) -> list[Sequence[Cell]]:
        """Groups consecutive cells into words."""
        starts = [i for i in range(len(cells)) if i == 0 or self._is_edge(cells[i - 1].truth, cells[i].truth)]
        return [cells[start:end] for start, end in itertools.pairwise([*starts, len(cells)])]

    def _word(self, word: Sequence[Cell], is_hidden: bool = False) -> str:
        """Decodes a word, in brackets if a token is predicted; `is_hidden` replaces a predicted word with […]."""
        guess = self._text(i for cell in word for i in cell.guess)
        truth = self._text(i for cell in word for i in cell.truth)
        if not any(cell.is_predicted for cell in word):
            return truth
        space = " " * truth[:1].isspace()
        if is_hidden:
            return f"{space}[…]"
        guess, truth = (one_line(text) or ("⏎" if "\n" in text else "␣") for text in (guess, truth))
        return f"{space}[{guess}]" if guess == truth else f"{space}[{guess} ≠ {truth}]"

    def displayed(self, tokens: np.ndarray) -> slice:
        """Returns the slice of tokens [n] to display: at most MAX_TOKENS tokens, with complete words at both ends."""
        ids = tokens.tolist()
        edges = [i for i in range(1, len(ids)) if self._is_edge(ids[i - 1 : i], ids[i : i + 1])]
        start = 0 if self.begins[tokens[0]] else min(edges, default=0)
        end = (
            len(tokens)
            if len(tokens) <= MAX_TOKENS
            else max((i for i in edges if start < i <= MAX_TOKENS), default=MAX_TOKENS)
        )
        return slice(start, end)

    def last_edge(self, ids: Sequence[int]) -> int:
        """Returns the index at which the last, possibly incomplete word begins, or len(ids) if it is the only word."""
        return max((i for i in range(1, len(ids)) if self._is_edge(ids[:i], ids[i:])), default=len(ids))

    def fraction_of_letters(self, example: Example) -> float:
        """Computes the fraction of letters and spaces among the characters of an example's displayed text."""
        tokens = example["encoder_tokens" if is_encoder_decoder(example) else "tokens"]
        line = self.line(tokens[self.displayed(tokens)].tolist())
        return sum(c.isalpha() or c == " " for c in line) / max(len(line), 1)

    def _text(self, ids: Iterable[int]) -> str:
        parts = []
        for is_special, run in itertools.groupby(ids, self.vocabulary.special_ids.__contains__):
            if is_special:
                parts += map(self._special, run)
            else:
                parts.append(b"".join(self.spellings[i] for i in run).decode("utf-8", "replace"))
        return "".join(parts)

    def _special(self, i: int) -> str:
        if i == self.vocabulary.separator:
            return " ¶ "
        return f" {self.pieces[i]} " if i in self.displayed_specials else ""

    def _is_edge(self, before: Sequence[int], after: Sequence[int]) -> bool:
        """Returns True if a word ends between two consecutive sequences of token ids."""
        return not before or not after or bool(self.ends[before[-1]] or self.begins[after[0]])


def one_line(text: str) -> str:
    """Replaces line breaks and repeated spaces with single spaces, and removes document marks at both ends."""
    return " ".join(text.split()).strip("¶ ")
