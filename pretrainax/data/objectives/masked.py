"""Masked language modelling: predicts some tokens of a sequence from all other tokens."""

import copy
import dataclasses
import functools
import math
import os
from typing import ClassVar, Optional

import numpy as np

from pretrainax.config import Choice
from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, Statistic
from pretrainax.data.objectives.masking_units import Chosen, MaskUnit, Runs, Tokens, WholeWords
from pretrainax.data.words import SimilarWords


@functools.lru_cache(maxsize=8)
def _ordinary(vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids that are not special, as a mask [V] bool and as a list [<= V] int32."""
    is_ordinary = np.ones(vocabulary.size, bool)
    is_ordinary[list(vocabulary.special_ids)] = False
    return is_ordinary, np.flatnonzero(is_ordinary).astype(np.int32)


@dataclasses.dataclass
class RateChange(Choice):
    """Changes the mask rate linearly from `MaskedLM.rate` to `to`, between the training progress `begin` and `end`.

    If `begin` equals `end`, the rate changes at once. Ankner et al. 2023 (arXiv 2305.15096) change it from 30 % to 15 %
    over the whole training.
    """

    to: float = 0.15  # the final rate
    begin: float = 0.0  # training progress at which the change begins, from 0 to 1
    end: float = 1.0  # training progress at which the change ends, from 0 to 1


@dataclasses.dataclass
class MaskedLM(Objective):
    """BERT's cloze task (Devlin et al. 2018, section 3.1), with a new mask each epoch (Liu et al. 2019, section 4.1).

    The model predicts rate * n of the n ordinary tokens (tokens that are not special) of a sequence, at least one. The
    number is rounded up or down at random, so that its mean is exact. Each predicted token is replaced by [MASK] with
    probability `mask_fraction`, by a uniformly drawn ordinary token with probability `random_fraction`, and otherwise
    stays unchanged. Special tokens are neither predicted nor drawn. With a rate of 0.3, `my dog is hairy and it barks`
    may become

        tokens             [CLS] my  dog  is  [MASK]  and  apple  barks  [SEP]
        masked_positions   4      6
        targets            hairy  it
        loss_weights       1      1

    The model computes its head at `masked_positions` only. A row has room for K = ceil(rate * T) positions (BERT's
    max_predictions_per_seq). Unused slots have weight 0, position 0 and target 0. If the rate changes, the highest rate
    sets K. RoBERTa's FULL-SENTENCES are sequences that cross document boundaries.

    With `similar_words`, a word is replaced by a similar word with the same number of tokens instead of by [MASK], or
    by random tokens if there is no similar word (MacBERT: Cui et al. 2020, arXiv 2004.13922, section 3.2).
    """

    rate: float = 0.15  # fraction of the ordinary (not special) tokens that are predicted
    mask_fraction: float = 0.8  # fraction of the predicted tokens that are replaced by [MASK]
    random_fraction: float = 0.1  # fraction of the predicted tokens that are replaced by a random token
    mask_unit: MaskUnit = dataclasses.field(default_factory=Tokens)  # Tokens() | WholeWords() | NGrams() | Spans()
    rate_change: Optional[RateChange] = None  # RateChange(): `rate` is only the initial rate
    similar_words: Optional[str] = None  # a JSON file, {word: [similar word, …]}, of words that replace [MASK]
    static: bool = False  # a sequence has the same mask in each epoch (BERT), not a new mask (RoBERTa)

    families: ClassVar[tuple[str, ...]] = ("encoder",)
    special_tokens: ClassVar[tuple[str, ...]] = ("mask", "cls", "sep")
    tokenizers: ClassVar[str] = "WordPiece, ByteBPE with special_pieces roberta or bert, or Unigram with albert"
    shortest: ClassVar[int] = 3  # [CLS], a token, [SEP]
    replaced_tokens: ClassVar[bool] = False  # True: the objective requires a model with a replaced_token_head

    _similar: ClassVar[Optional[SimilarWords]] = None  # set by `bind`

    def field_problems(self):
        if not 0 < self.rate <= 1:
            yield f"config.objective.rate is {self.rate}, it must be in (0, 1]"
        for name in ("mask_fraction", "random_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                yield f"config.objective.{name} is {getattr(self, name)}, it must be in [0, 1]"
        if self.mask_fraction + self.random_fraction > 1 + 1e-9:  # 0.9 + 0.1 may exceed 1 by a rounding error
            yield (
                f"config.objective.mask_fraction {self.mask_fraction} + random_fraction {self.random_fraction} is more "
                "than 1"
            )
        if isinstance(self.mask_unit, MaskUnit):
            yield from self.mask_unit.field_problems()
        else:
            yield (
                f"config.objective.mask_unit is {type(self.mask_unit).__name__}, allowed: Tokens, WholeWords, NGrams, "
                "Spans"
            )
        yield from self._rate_change_problems()
        if self.similar_words is not None:
            if not isinstance(self.mask_unit, WholeWords):
                kind = type(self.mask_unit).__name__
                yield f"config.objective.similar_words replaces whole words, config.objective.mask_unit is {kind}"
            if not os.path.isfile(os.path.expanduser(self.similar_words)):
                yield f"config.objective.similar_words is {self.similar_words!r}, which is not a file"

    def _rate_change_problems(self):
        """Yields the error lines about `rate_change`."""
        change, path = self.rate_change, "config.objective.rate_change"
        if change is None:
            return
        if not isinstance(change, RateChange):
            yield f"{path} is {type(change).__name__}, it must be a RateChange"
            return
        if not 0 < change.to <= 1:
            yield f"{path}.to is {change.to}, it must be in (0, 1]"
        if self.static:
            yield f"config.objective.static is True, which excludes {path}: set static=False or rate_change=None"
        if not 0 <= change.begin <= change.end <= 1:
            yield f"{path} is from begin {change.begin} to end {change.end}, it must be 0 <= begin <= end <= 1"

    def problems(self, experiment):
        yield from super().problems(experiment)
        if experiment.model.replaced_token_head != self.replaced_tokens:
            has = "has a" if experiment.model.replaced_token_head else "has no"
            fitting = "MaskedLM" if self.replaced_tokens else "ReplacedTokenDetection"
            yield (
                f"config.objective is {type(self).__name__}, config.model {has} replaced_token_head: set "
                f"config.objective to {fitting}"
            )

    def bind(self, tokenizer):
        bound = copy.copy(self)
        bound.mask_unit = self.mask_unit.bind(tokenizer)
        if self.similar_words is not None:
            bound._similar = SimilarWords(tokenizer, self.similar_words)
        return bound

    @property
    def rates(self) -> tuple[float, float]:
        """Returns the lowest and the highest mask rate of the training."""
        last = self.rate if self.rate_change is None else self.rate_change.to
        return min(self.rate, last), max(self.rate, last)

    def rate_at(self, progress: float) -> float:
        """Returns the mask rate at a training progress from 0 to 1."""
        change = self.rate_change
        if change is None or progress < change.begin:
            return self.rate
        if progress >= change.end:
            return change.to
        return self.rate + (change.to - self.rate) * (progress - change.begin) / (change.end - change.begin)

    def between(self, begin, end):
        part = copy.copy(self)
        part.rate, part.rate_change = self.rate_at(begin), RateChange(to=self.rate_at(end))
        return part

    def lengths(self, sequence_length):
        return Lengths(raw=sequence_length - 2, inputs=sequence_length, targets=self._max_predicted(sequence_length))

    def measure(self, raw):
        return Lengths(raw, inputs=raw + 2, targets=self._max_predicted(raw))

    def _max_predicted(self, tokens: int) -> int:
        """Returns the maximum number of predicted tokens in a sequence of `tokens` tokens, at the highest mask rate."""
        return max(math.ceil(self.rates[1] * tokens - 1e-6), 1)  # 0.07 * 100 is 7.000000000000001

    def example(self, text, rng, vocabulary):
        length = len(text.tokens) + 2
        row = np.empty(length, np.int32)
        row[0], row[1:-1], row[-1] = vocabulary.cls, text.tokens, vocabulary.sep
        return {
            **self.mask(row, rng, vocabulary, text.progress),
            "segment_ids": np.ones(length, np.int32),
            "positions": np.arange(length, dtype=np.int32),
            "token_types": np.zeros(length, np.int32),
        }

    def mask(self, row: np.ndarray, rng: np.random.Generator, vocabulary, progress: float = 1.0) -> dict:
        """Masks a row [n] int32, which includes special tokens; returns its `tokens` and the arrays of predictions.

        progress: training progress from 0 to 1, which determines the mask rate.
        """
        is_ordinary, ordinary_ids = _ordinary(vocabulary)
        ordinary = is_ordinary.take(row)
        count = np.count_nonzero(ordinary)
        if count:
            budget = int(self.rate_at(progress) * count + rng.random())
            chosen = self.mask_unit.choose(row, ordinary, min(max(budget, 1), self._max_predicted(count)), rng)
        else:
            chosen = Chosen(np.zeros(0, np.int64), np.zeros(0, np.int64))
        places, masked = chosen.places, row.copy()
        targets = row[places]
        masked[places] = self._replaced(row, targets, chosen, rng, ordinary_ids, vocabulary.mask)
        return {
            "tokens": masked,
            "masked_positions": places.astype(np.int32),
            "targets": targets,
            "loss_weights": np.ones(len(places), np.float32),
        }

    def _replaced(self, row, targets, chosen, rng, ordinary_ids, mask) -> np.ndarray:
        """Returns the ids that replace the chosen tokens in the input, [k] int32."""
        kind, draws = rng.random((2, len(targets)))
        words = None
        if self._similar is not None:
            words = self.mask_unit.starts(row)[chosen.places].cumsum() - 1  # [k], numbers the words from 0
            kind = kind[words]
        if self.mask_unit.shares_replacement:
            kind = kind[np.unique(chosen.spans, return_inverse=True)[1]]
        replaced, is_masked = targets.copy(), kind < self.mask_fraction
        if words is not None or self.random_fraction:
            random = ordinary_ids.take((draws * len(ordinary_ids)).astype(np.intp))
            np.putmask(replaced, kind < self.mask_fraction + self.random_fraction, random)
        if words is None:
            np.putmask(replaced, is_masked, mask)
            return replaced
        ends = np.flatnonzero(np.diff(words, append=-1)) + 1  # [w], one per word
        for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            similar = self._similar.similar_to(tuple(targets[start:end].tolist())) if is_masked[start] else ()
            if similar:
                replaced[start:end] = similar[int(draws[start] * len(similar))]
        return replaced

    def restore(self, example, vocabulary):
        return _unmasked(example)[1:-1]

    def statistics(self, examples, vocabulary):
        yield from _rate(self, examples, vocabulary)
        yield from _replacements(self, examples, vocabulary)
        if isinstance(self.mask_unit, WholeWords):
            yield from _words(self, examples, vocabulary)


def _unmasked(example) -> np.ndarray:
    """Returns the tokens of an example before masking."""
    row = example["tokens"].copy()
    row[example["masked_positions"]] = example["targets"]
    return row


def _rate(objective, examples, vocabulary):
    """Yields the statistic "mask rate": predicted tokens of all examples, divided by tokens that are not special."""
    is_ordinary, _ = _ordinary(vocabulary)
    low, high = objective.rates
    counts = np.array([np.count_nonzero(is_ordinary[_unmasked(e)]) for e in examples])
    predicted = sum(len(e["targets"]) for e in examples)
    if not counts.any():
        return
    # Random rounding has a standard deviation of at most 1/2. Tiny sequences predict at least one token. A budget is
    # missed by less than the length of the shortest word that was not chosen.
    slack = 5 * math.sqrt(len(counts)) / 2 + np.maximum(1 - low * counts, 0)[counts > 0].sum()
    if isinstance(objective.mask_unit, WholeWords):
        for example in examples:
            sizes, taken = _sizes(objective, example, vocabulary)
            others = sizes[(sizes > 0) & (taken == 0)]
            slack += others.min() - 1 if len(others) else 0
    yield Statistic("mask rate", predicted / counts.sum(), (low + high) / 2, (high - low) / 2 + slack / counts.sum())


def _sizes(objective, example, vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Returns two numbers for each word of an example, both [W] int64: its ordinary tokens and its predicted tokens."""
    is_ordinary, _ = _ordinary(vocabulary)
    row = _unmasked(example)
    starts = np.flatnonzero(objective.mask_unit.starts(row))
    predicted = np.zeros(len(row), np.int64)
    predicted[example["masked_positions"]] = 1
    return np.add.reduceat(is_ordinary[row].astype(np.int64), starts), np.add.reduceat(predicted, starts)


def _replacements(objective, examples, vocabulary):
    """Yields the fractions of the predicted tokens that are replaced by [MASK], replaced at random, or unchanged."""
    masked, unchanged, sizes = [], [], []  # per token, per token, per group with a common draw
    for example in examples:
        places, targets = example["masked_positions"], example["targets"]
        if not len(places):
            continue
        written, firsts = example["tokens"][places], np.arange(len(places))
        same = written == targets
        if objective.mask_unit.shares_replacement:
            firsts = np.flatnonzero(np.diff(places, prepend=-1) > 1)
        elif objective.similar_words is not None:
            firsts = np.flatnonzero(objective.mask_unit.starts(_unmasked(example))[places])
            # A similar word may share a token with the original: only whole words count as unchanged.
            same = np.repeat(np.logical_and.reduceat(same, firsts), np.diff(firsts, append=len(places)))
        masked.append(written == vocabulary.mask)
        unchanged.append(same)
        sizes.append(np.diff(firsts, append=len(places)))
    if not unchanged:
        return
    sizes = np.concatenate(sizes)
    masked, unchanged = np.concatenate(masked), np.concatenate(unchanged)

    def statistic(name, measured, expected):
        deviation = math.sqrt(max(expected * (1 - expected), 0) * np.square(sizes).sum()) / sizes.sum()
        by_chance = 1 / len(_ordinary(vocabulary)[1])  # probability that a random token equals the original
        return Statistic(name, float(measured), expected, 5 * deviation + by_chance + 1 / sizes.sum())

    mask, random = objective.mask_fraction, objective.random_fraction
    if objective.similar_words is None:
        yield statistic("masked", masked.mean(), mask)
        yield statistic("random", np.mean(~masked & ~unchanged), random)
    yield statistic("kept", unchanged.mean(), 1 - mask - random)


def _words(objective, examples, vocabulary):
    """Yields the fraction of words that are predicted whole, and the mean length of runs of predicted words."""
    words = [_sizes(objective, example, vocabulary) for example in examples]
    touched = sum(np.count_nonzero(taken) for _, taken in words)
    if touched:
        whole = sum(np.count_nonzero(taken * (taken == sizes)) for sizes, taken in words)
        alone = sum(np.count_nonzero(taken) == 1 for _, taken in words)  # if no word fits, part of a word is predicted
        yield Statistic("words predicted whole", whole / touched, 1.0, alone / touched)
        yield _run_length(objective.mask_unit, words)


def _run_length(unit: WholeWords, words: list[tuple[np.ndarray, np.ndarray]]) -> Statistic:
    """Returns the statistic "words in a row": the mean number of words in a run of predicted words.

    The expected value takes into account that the last run is truncated.
    """
    if isinstance(unit, Runs):  # in nearly full sequences, runs cannot move
        words = [(sizes, taken) for sizes, taken in words if 5 * np.count_nonzero(taken) <= 2 * len(sizes)]
    touched = runs = more = fewer = expected = variance = 0
    for sizes, taken in words:
        chosen = taken > 0
        count = np.count_nonzero(chosen)
        ends = np.flatnonzero(np.diff(chosen.astype(np.int8), append=0) == -1)
        touched, runs = touched + count, runs + len(ends)
        if isinstance(unit, Runs):
            mean, spread = unit.runs_of(int(count))
            expected, variance = expected + mean, variance + spread
            # Runs of long words may not use the whole budget. The rest goes to another word, which is a new run or
            # joins other runs. The end of the sequence ends runs too.
            more += np.any(sizes > 1) + np.count_nonzero(np.append(sizes, 0)[ends + 1] == 0)
            fewer += 2 * count / len(sizes)
    measured = touched / max(runs, 1)
    if not expected:
        return Statistic("words in a row", measured)
    length, slack = touched / expected, 5 * math.sqrt(variance)
    most, fewest = expected + slack + more, max(expected - slack - fewer, 1)
    return Statistic(
        "words in a row", measured, length, length - touched / most if measured < length else touched / fewest - length
    )
