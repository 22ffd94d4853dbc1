"""The units that are masked as one: single tokens, whole words, n-grams, spans."""

import copy
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Optional

import numpy as np

from pretrainax.config import Choice
from pretrainax.data.words import Words
from pretrainax.storage.places import here
from pretrainax.tokenization.base import Tokenizer


class Chosen(NamedTuple):
    """The tokens of a text that are to be predicted."""

    places: np.ndarray  # [k] int64, in order
    spans: Optional[np.ndarray] = None  # [k] int64, numbers those that were drawn as one; None: each by itself


class MaskUnit(Choice):
    """Base of the units of masking."""

    shares_fate: ClassVar[bool] = False  # tokens of one draw are all masked, all random or all kept

    def field_problems(self) -> Iterator[str]:
        """Yields one line for each own field out of range."""
        yield from ()

    def bind(self, tokenizer: Tokenizer) -> "MaskUnit":
        """This unit with what it knows of the tokenizer's words."""
        return self

    def choose(self, tokens: np.ndarray, ordinary: np.ndarray, budget: int, rng: np.random.Generator) -> Chosen:
        """Draws what is predicted.

        Args:
          tokens: [n] int32.
          ordinary: [n] bool, the tokens that may be chosen.
          budget: how many are; at least 1, at most as many as are ordinary.
        """
        raise NotImplementedError


@dataclasses.dataclass
class Tokens(MaskUnit):
    """Each token by itself (Devlin et al. 2018)."""

    def choose(self, tokens, ordinary, budget, rng):
        candidates = ordinary.nonzero()[0]
        places = candidates[rng.random(len(candidates)).argpartition(budget - 1)[:budget]]
        places.sort()
        return Chosen(places)


@dataclasses.dataclass
class WholeWords(MaskUnit):
    """All tokens of a word or none (Devlin et al. 2019, the released code's README; Chinese: Cui et al. 2019).

    Words are taken in random order. One that would exceed the budget is passed over, and what is left is filled with
    words that fit; so up to the length of a word may be missing. Where not even one word fits, which takes a tiny
    text, the first tokens of one are taken.

    Words are those of `Tokenizer.word_edges`, of any tokenizer. Chinese, whose characters would be a word each, needs
    its segmentation: a list of words.
    """

    word_list: Optional[str] = None  # a file of words of several characters, one a line, of which the longest is taken

    _words: ClassVar[Optional[Words]] = None  # of a bound one

    def field_problems(self):
        if self.word_list is not None and not os.path.isfile(here(os.path.expanduser(self.word_list))):
            yield f"config.objective.mask_unit.word_list is {self.word_list!r}, which is no file"

    def bind(self, tokenizer):
        bound = copy.copy(self)
        bound._words = Words(tokenizer, self.word_list)
        return bound

    def starts(self, tokens: np.ndarray) -> np.ndarray:
        """Tells if a word starts at each of the tokens: [n] bool."""
        assert self._words is not None, "where words begin is known to an objective that is bound to its tokenizer"
        return self._words.starts(tokens)

    def choose(self, tokens, ordinary, budget, rng):
        starts = np.flatnonzero(self.starts(tokens))
        lengths = np.diff(starts, append=len(tokens))  # [W] tokens of each word
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
        """Draws words in the order in which they are taken, and the number of the draw of each; may be too many."""
        words = rng.permutation(np.flatnonzero(sizes))
        return words, words


class Runs(WholeWords):
    """Whole words, several in a row, of a random number that is drawn first.

    Then the runs are laid into the text, every arrangement in which they neither overlap nor touch being equally
    likely. They are taken in the order of the draws. The last one is cut after the last word that fits the budget, a
    run that meets the end of a document ends there.
    """

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of draws of 1, 2, 3, … words; they add up to 1."""
        raise NotImplementedError

    def runs_of(self, words: int) -> tuple[float, float]:
        """Returns mean and variance of the number of draws that it takes to have so many words, the last one cut."""
        mean, square = _runs(self.shares, 1 << max(words, 1).bit_length())
        return mean[words], square[words] - mean[words] ** 2

    def _draw(self, sizes, budget, rng):
        # A word has at least one token, so twice the budget in words is enough but for texts full of special tokens.
        words = _cumulative(self.shares).searchsorted(rng.random(2 * budget), "right") + 1
        words = words.clip(max=len(self.shares))  # the shares add up to 1 but for a rounding error
        # As many as the budget takes and ends of documents cost: runs that fill the text would hardly ever begin at its
        # second word, as the first one, which is special, would be within a run.
        lost = np.count_nonzero(sizes == 0) * budget * len(self.shares) // len(sizes)
        words = words[: words.cumsum().searchsorted(budget + lost) + 1]
        room = len(sizes) - (words.cumsum() - words) - np.arange(len(words))  # for each, with a word between each two
        words = np.minimum(words, room)[room > 0]
        totals = words.cumsum()
        # Runs and the other words in turn: the runs take some of the places before, between and after the others.
        places = rng.choice(len(sizes) - totals[-1] + 1, len(words), replace=False)
        order = places.argsort()
        firsts = np.empty_like(words)
        firsts[order] = places[order] + words[order].cumsum() - words[order]
        # [R] runs -> [words]
        spans = np.repeat(np.arange(len(words)), words)
        drawn = np.arange(totals[-1]) + (firsts - totals + words)[spans]
        is_end = sizes[drawn] == 0
        ends = is_end.cumsum()
        reached = ends == (ends - is_end)[totals - words][spans]  # no end of a document before it in its run
        return drawn[reached], spans[reached]


@dataclasses.dataclass
class NGrams(Runs):
    """Up to three words in a row, n of them with probability (1/n) / (1/1 + 1/2 + 1/3) (Lan et al. 2019, section 3.1).

    MacBERT's (Cui et al. 2020, section 3.2) are weights=(0.4, 0.3, 0.2, 0.1). Each token has its own fate.
    """

    weights: tuple[float, ...] = (1.0, 1 / 2, 1 / 3)  # of 1, 2, 3, … words

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
    """SpanBERT's spans (Joshi et al. 2019, section 3.1): n words with a probability that falls by `stop` with each.

    0.2 and 10 words are 3.8 words on average. All tokens of a span are masked, or all random, or all kept.
    """

    stop: float = 0.2  # probability that a span ends after a word
    longest: int = 10  # words

    shares_fate = True

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
    """Returns the mean number of draws until they add up to 0, …, size - 1, and of its square: [size] float64 both."""
    mean, square, back = np.zeros(size), np.zeros(size), np.array(shares[::-1])
    for n in range(1, size):
        before, chances = slice(max(n - len(back), 0), n), back[max(len(back) - n, 0) :]
        mean[n] = 1 + chances @ mean[before]
        square[n] = 1 + 2 * chances @ mean[before] + chances @ square[before]
    return mean, square


@functools.lru_cache(maxsize=8)
def _cumulative(shares: tuple[float, ...]) -> np.ndarray:
    return np.cumsum(shares)
