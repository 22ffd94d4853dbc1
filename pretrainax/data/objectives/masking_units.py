"""Defines the units of masking: single tokens, whole words, n-grams and spans."""

import copy
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Optional

import numpy as np

from pretrainax.config import Choice
from pretrainax.data.words import Words
from pretrainax.storage.places import local_path
from pretrainax.tokenization.base import Tokenizer


class Chosen(NamedTuple):
    """The tokens of a sequence that the model predicts."""

    places: np.ndarray  # [k] int64, sorted positions
    spans: Optional[np.ndarray] = None  # [k] int64, number of the draw of each token; None: one draw per token


class MaskUnit(Choice):
    """Base class of masking units, which choose the tokens that the model predicts."""

    shares_replacement: ClassVar[bool] = False  # True: tokens of one draw are all masked, all random or all unchanged

    def field_problems(self) -> Iterator[str]:
        """Yields one error line per field that is out of range."""
        yield from ()

    def bind(self, tokenizer: Tokenizer) -> "MaskUnit":
        """Returns this unit with the word boundaries of a tokenizer."""
        return self

    def choose(self, tokens: np.ndarray, ordinary: np.ndarray, budget: int, rng: np.random.Generator) -> Chosen:
        """Draws the tokens of a sequence that the model predicts.

        Args:
          tokens: [n] int32, the sequence.
          ordinary: [n] bool, True for the tokens that may be chosen: tokens that are not special.
          budget: number of tokens to choose; at least 1, at most the number of ordinary tokens.
        """
        raise NotImplementedError


@dataclasses.dataclass
class Tokens(MaskUnit):
    """Chooses each token independently (Devlin et al. 2018)."""

    def choose(self, tokens, ordinary, budget, rng):
        candidates = ordinary.nonzero()[0]
        places = candidates[rng.random(len(candidates)).argpartition(budget - 1)[:budget]]
        places.sort()
        return Chosen(places)


@dataclasses.dataclass
class WholeWords(MaskUnit):
    """Chooses all tokens of a word or none (Devlin et al. 2019, README of the released code; Chinese: Cui et al. 2019).

    Words are chosen in random order. Words that exceed the budget are skipped, and words that fit fill the rest of the
    budget. The total may be below the budget by less than one word. If no word fits, which happens only in tiny
    sequences, the first tokens of one word are chosen.

    `Tokenizer.word_edges` defines the words, for any tokenizer. In Chinese, each character would be a word, so a list
    of words must define the segmentation.
    """

    word_list: Optional[str] = None  # a file of multi-character words, one per line; the longest match is a word

    _words: ClassVar[Optional[Words]] = None  # set by `bind`

    def field_problems(self):
        if self.word_list is not None and not os.path.isfile(local_path(os.path.expanduser(self.word_list))):
            yield f"config.objective.mask_unit.word_list is {self.word_list!r}, which is not a file"

    def bind(self, tokenizer):
        bound = copy.copy(self)
        bound._words = Words(tokenizer, self.word_list)
        return bound

    def starts(self, tokens: np.ndarray) -> np.ndarray:
        """Returns True for each token that starts a word, [n] int32 -> [n] bool."""
        assert self._words is not None, "the objective must be bound to its tokenizer to find the starts of words"
        return self._words.starts(tokens)

    def choose(self, tokens, ordinary, budget, rng):
        starts = np.flatnonzero(self.starts(tokens))
        lengths = np.diff(starts, append=len(tokens))  # [W] number of tokens in each word
        sizes = lengths * ordinary[starts]  # a special token is a word that cannot be chosen
        words, spans = self._draw(sizes, budget, rng)
        fitting = sizes[words].cumsum().searchsorted(budget, "right")
        span_of = np.full(len(sizes), -1)  # [W]; -1: not chosen
        span_of[words[:fitting]] = spans[:fitting]
        left, span = budget - sizes[words[:fitting]].sum(), len(sizes)
        if left:
            others = rng.permutation(np.flatnonzero((sizes > 0) & (span_of < 0)))
            for word in others[sizes[others] <= left].tolist():
                if sizes[word] <= left:
                    span_of[word], left, span = span, left - sizes[word], span + 1
            if left == budget:
                return Chosen(starts[others[0]] + np.arange(budget), np.zeros(budget, np.int64))
        span_of = np.repeat(span_of, lengths)  # [n]
        places = np.flatnonzero(span_of >= 0)
        return Chosen(places, span_of[places])

    def _draw(self, sizes: np.ndarray, budget: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws words in the order of choice; returns the index of each word and the number of its draw.

        sizes: [W], the number of tokens of each word; 0 for words that cannot be chosen. The drawn words may exceed the
        budget.
        """
        words = rng.permutation(np.flatnonzero(sizes))
        return words, words


class Runs(WholeWords):
    """Chooses runs of whole words with random lengths.

    The lengths are drawn first. The runs are then placed in the sequence uniformly at random, without overlapping or
    adjacent runs. Runs are masked in the order in which their lengths were drawn, until the budget is spent. The last
    run is truncated to the words that fit. A run that reaches the end of a document ends there.
    """

    @property
    def shares(self) -> tuple[float, ...]:
        """Returns the probabilities of runs of 1, 2, 3, … words; they add up to 1."""
        raise NotImplementedError

    def runs_of(self, words: int) -> tuple[float, float]:
        """Returns the mean and the variance of the number of runs that contain `words` words.

        The last run may be truncated.
        """
        mean, square = _runs(self.shares, 1 << max(words, 1).bit_length())
        return mean[words], square[words] - mean[words] ** 2

    def _draw(self, sizes, budget, rng):
        # A word has at least one token, so 2 * budget runs are enough, except in sequences full of special tokens.
        words = _cumulative(self.shares).searchsorted(rng.random(2 * budget), "right") + 1
        words = words.clip(max=len(self.shares))  # a rounding error may make the sum of the shares less than 1
        # Drop runs that exceed the budget plus the words lost at ends of documents. Runs that fill the sequence would
        # rarely begin at its second word, because the first word, which is special, would be inside of a run.
        lost = np.count_nonzero(sizes == 0) * budget * len(self.shares) // len(sizes)
        words = words[: words.cumsum().searchsorted(budget + lost) + 1]
        room = len(sizes) - (words.cumsum() - words) - np.arange(len(words))  # for each run, with one word between runs
        words = np.minimum(words, room)[room > 0]
        totals = words.cumsum()
        # Runs and other words alternate: the runs take some of the places before, between and after the other words.
        places = rng.choice(len(sizes) - totals[-1] + 1, len(words), replace=False)
        order = places.argsort()
        firsts = np.empty_like(words)
        firsts[order] = places[order] + words[order].cumsum() - words[order]
        # [R] runs -> [words]
        spans = np.repeat(np.arange(len(words)), words)
        drawn = np.arange(totals[-1]) + (firsts - totals + words)[spans]
        is_end = sizes[drawn] == 0
        ends = is_end.cumsum()
        reached = ends == (ends - is_end)[totals - words][spans]  # no end of a document precedes it in its run
        return drawn[reached], spans[reached]


@dataclasses.dataclass
class NGrams(Runs):
    """Chooses n-grams of up to three words, with probability (1/n) / (1/1 + 1/2 + 1/3) (Lan et al. 2019, section 3.1).

    MacBERT uses weights=(0.4, 0.3, 0.2, 0.1) (Cui et al. 2020, section 3.2). Each token is replaced independently.
    """

    weights: tuple[float, ...] = (1.0, 1 / 2, 1 / 3)  # of n-grams of 1, 2, 3, … words

    def field_problems(self):
        yield from super().field_problems()
        if not self.weights or min(self.weights) < 0 or not sum(self.weights) > 0:
            yield (
                f"config.objective.mask_unit.weights is {self.weights}, it must be a tuple of numbers of at least 0, "
                "not all of them 0"
            )

    @property
    def shares(self):
        return tuple(weight / sum(self.weights) for weight in self.weights)


@dataclasses.dataclass
class Spans(Runs):
    """Chooses SpanBERT's spans, whose lengths in words are geometrically distributed (Joshi et al. 2019, section 3.1).

    stop=0.2 and longest=10 give 3.8 words on average. All tokens of a span are masked, all random, or all unchanged.
    """

    stop: float = 0.2  # probability that a span ends after a word
    longest: int = 10  # maximum number of words

    shares_replacement = True

    def field_problems(self):
        yield from super().field_problems()
        if not 0 < self.stop <= 1:
            yield f"config.objective.mask_unit.stop is {self.stop}, it must be in (0, 1]"
        if self.longest < 1:
            yield f"config.objective.mask_unit.longest is {self.longest}, it must be at least 1"

    @property
    def shares(self):
        weights = [(1 - self.stop) ** n for n in range(self.longest)]
        return tuple(weight / sum(weights) for weight in weights)


@functools.lru_cache(maxsize=64)
def _runs(shares: tuple[float, ...], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean number of draws until the lengths add up to n, and the mean of its square, for n < size.

    Both are [size] float64. shares: the probability of each run length.
    """
    mean, square, back = np.zeros(size), np.zeros(size), np.array(shares[::-1])
    for n in range(1, size):
        before, chances = slice(max(n - len(back), 0), n), back[max(len(back) - n, 0) :]
        mean[n] = 1 + chances @ mean[before]
        square[n] = 1 + 2 * chances @ mean[before] + chances @ square[before]
    return mean, square


@functools.lru_cache(maxsize=8)
def _cumulative(shares: tuple[float, ...]) -> np.ndarray:
    """Returns the cumulative sums of probabilities."""
    return np.cumsum(shares)
