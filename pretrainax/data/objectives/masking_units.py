"""Defines the units in which a masked language model masks tokens: single tokens, whole words, n-grams and spans."""

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
    """The positions of the tokens that the model predicts in a sequence, and which of them were drawn together."""

    places: np.ndarray  # [k] int64, sorted positions of the tokens
    spans: Optional[np.ndarray] = None  # [k] int64, the number of each token's draw; None: one draw per token


class MaskUnit(Choice):
    """Base class of masking units, which choose the tokens that a masked language model predicts."""

    shares_replacement: ClassVar[bool] = False  # True: all tokens of a draw are masked, random or unchanged

    def field_problems(self) -> Iterator[str]:
        """Yields error lines about invalid field values of this unit."""
        yield from ()

    def bind(self, tokenizer: Tokenizer) -> "MaskUnit":
        """Returns this unit bound to a tokenizer, which determines the word boundaries."""
        return self

    def choose(self, tokens: np.ndarray, ordinary: np.ndarray, budget: int, rng: np.random.Generator) -> Chosen:
        """Draws the tokens that the model predicts in a sequence, at most `budget` of them.

        Args:
          tokens: [n] int32, the sequence with its special tokens.
          ordinary: [n] bool, True for tokens that may be chosen, False for special tokens.
          budget: the number of tokens to choose, from 1 to the number of ordinary tokens.
        """
        raise NotImplementedError


@dataclasses.dataclass
class Tokens(MaskUnit):
    """Chooses single tokens uniformly at random (Devlin et al. 2018)."""

    def choose(self, tokens, ordinary, budget, rng):
        candidates = ordinary.nonzero()[0]
        positions = candidates[rng.random(len(candidates)).argpartition(budget - 1)[:budget]]
        positions.sort()
        return Chosen(positions)


@dataclasses.dataclass
class WholeWords(MaskUnit):
    """Chooses all tokens of a word or none (Devlin et al. 2019, README of the released code; Chinese: Cui et al. 2019).

    Words are chosen in random order. A word that exceeds the remaining budget (of tokens) is skipped, and later words
    that fit are chosen instead, so the budget left over is too small for any word that was not chosen. If no word fits,
    which happens only in tiny sequences, the first tokens of one word are chosen.

    Words are defined by `Tokenizer.word_edges`, for any tokenizer. In Chinese, each character is a word, so set
    `word_list` to mask words of several characters.
    """

    word_list: Optional[str] = None  # path of a file of multi-character words, one per line; the longest match counts

    _words: ClassVar[Optional[Words]] = None  # set by `bind`

    def field_problems(self):
        if self.word_list is not None and not os.path.isfile(local_path(os.path.expanduser(self.word_list))):
            yield f"config.objective.mask_unit.word_list is {self.word_list!r}, which is not a file"

    def bind(self, tokenizer):
        bound = copy.copy(self)
        bound._words = Words(tokenizer, self.word_list)
        return bound

    def starts(self, tokens: np.ndarray) -> np.ndarray:
        """Returns which tokens start a word, [n] int32 -> [n] bool."""
        assert self._words is not None, "the objective must be bound to its tokenizer to find the starts of words"
        return self._words.starts(tokens)

    def choose(self, tokens, ordinary, budget, rng):
        starts = np.flatnonzero(self.starts(tokens))
        lengths = np.diff(starts, append=len(tokens))  # [W] number of tokens in each word
        sizes = lengths * ordinary[starts]  # 0 for special tokens, which are words that cannot be chosen
        words, spans = self._draw(sizes, budget, rng)
        num_fitting = sizes[words].cumsum().searchsorted(budget, "right")
        span_numbers = np.full(len(sizes), -1)  # [W]; -1: not chosen
        span_numbers[words[:num_fitting]] = spans[:num_fitting]
        remaining, span = budget - sizes[words[:num_fitting]].sum(), len(sizes)
        if remaining:
            candidates = rng.permutation(np.flatnonzero((sizes > 0) & (span_numbers < 0)))
            for word in candidates[sizes[candidates] <= remaining].tolist():
                if sizes[word] <= remaining:
                    span_numbers[word], remaining, span = span, remaining - sizes[word], span + 1
            if remaining == budget:
                return Chosen(starts[candidates[0]] + np.arange(budget), np.zeros(budget, np.int64))
        span_numbers = np.repeat(span_numbers, lengths)  # [n]
        positions = np.flatnonzero(span_numbers >= 0)
        return Chosen(positions, span_numbers[positions])

    def _draw(self, sizes: np.ndarray, budget: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws words in the order in which to choose them; together, they may exceed the budget.

        Args:
          sizes: [W], the number of tokens in each word; 0 for words that cannot be chosen.

        Returns:
          The index of each drawn word, and the number of its draw; words drawn together, as a run, share a number.
        """
        words = rng.permutation(np.flatnonzero(sizes))
        return words, words


class Runs(WholeWords):
    """Base class of units that choose runs of whole words with random lengths.

    The lengths are drawn first. The runs are then placed in the sequence uniformly at random, so that none overlap or
    touch. They are masked in the order in which their lengths were drawn, until the budget is spent; the last run is
    truncated to the words that fit. A run that reaches the end of a document ends there.
    """

    @property
    def shares(self) -> tuple[float, ...]:
        """Returns the probabilities of runs of 1, 2, 3, … words, which add up to 1."""
        raise NotImplementedError

    def runs_of(self, words: int) -> tuple[float, float]:
        """Returns the mean and variance of the number of runs that are drawn to cover `words` words.

        The last run counts even if it is truncated.
        """
        mean, square = _draw_moments(self.shares, 1 << max(words, 1).bit_length())
        return mean[words], square[words] - mean[words] ** 2

    def _draw(self, sizes, budget, rng):
        # A word has at least one token, so 2 * budget runs suffice, except in sequences with many special tokens.
        lengths = _cumulative_sums(self.shares).searchsorted(rng.random(2 * budget), "right") + 1
        lengths = lengths.clip(max=len(self.shares))  # the sum of the probabilities may round to less than 1
        # Drop runs that exceed the budget plus the words that may be lost at the ends of documents. If runs filled the
        # sequence, they would rarely begin at its second word: a run would cover the first word, a special token.
        max_lost = np.count_nonzero(sizes == 0) * budget * len(self.shares) // len(sizes)
        lengths = lengths[: lengths.cumsum().searchsorted(budget + max_lost) + 1]
        # The capacity for each run, with a gap of one word between runs.
        capacity = len(sizes) - (lengths.cumsum() - lengths) - np.arange(len(lengths))
        lengths = np.minimum(lengths, capacity)[capacity > 0]
        totals = lengths.cumsum()
        # Each run is inserted into a different slot: before, between or after the words that are in no run.
        slots = rng.choice(len(sizes) - totals[-1] + 1, len(lengths), replace=False)
        slot_order = slots.argsort()
        starts = np.empty_like(lengths)
        starts[slot_order] = slots[slot_order] + lengths[slot_order].cumsum() - lengths[slot_order]
        # Expand the runs [R] to the indices of their words [words].
        spans = np.repeat(np.arange(len(lengths)), lengths)
        word_indices = np.arange(totals[-1]) + (starts - totals + lengths)[spans]
        is_end = sizes[word_indices] == 0
        ends = is_end.cumsum()
        is_before_end = ends == (ends - is_end)[totals - lengths][spans]  # no document ends earlier in the run
        return word_indices[is_before_end], spans[is_before_end]


@dataclasses.dataclass
class NGrams(Runs):
    """Chooses n-grams of 1 to 3 words, with probabilities proportional to 1/n (Lan et al. 2019, section 3.1).

    MacBERT uses weights=(0.4, 0.3, 0.2, 0.1) (Cui et al. 2020, section 3.2). The replacement of each token is
    drawn independently.
    """

    weights: tuple[float, ...] = (1.0, 1 / 2, 1 / 3)  # unnormalized probabilities of n-grams of 1, 2, 3, … words

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

    With stop=0.2 and longest=10, a span has 3.8 words on average. The tokens of a span are either all masked, all
    replaced by random tokens, or all unchanged.
    """

    stop: float = 0.2  # probability that a span ends after each of its words
    longest: int = 10  # maximum number of words in a span

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
def _draw_moments(shares: tuple[float, ...], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes the mean and mean square of the number of runs drawn until their lengths add up to at least n.

    shares: the probabilities of run lengths 1, 2, 3, …

    Returns:
      Two arrays [size] float64, for n = 0, …, size - 1.
    """
    mean, square, reversed_shares = np.zeros(size), np.zeros(size), np.array(shares[::-1])
    for n in range(1, size):
        previous, probabilities = (
            slice(max(n - len(reversed_shares), 0), n),
            reversed_shares[max(len(reversed_shares) - n, 0) :],
        )
        mean[n] = 1 + probabilities @ mean[previous]
        square[n] = 1 + 2 * probabilities @ mean[previous] + probabilities @ square[previous]
    return mean, square


@functools.lru_cache(maxsize=8)
def _cumulative_sums(shares: tuple[float, ...]) -> np.ndarray:
    """Computes the cumulative sums of the probabilities `shares`, and caches them."""
    return np.cumsum(shares)
