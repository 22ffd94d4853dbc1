"""Masked language modelling: predicts some tokens of a sequence from all the others."""

import copy
import dataclasses
import functools
import math
import os
from typing import ClassVar, Optional

import numpy as np

from pretrainax.config import Choice, UserError
from pretrainax.data.batch import REPLACEMENTS, Lengths
from pretrainax.data.framing import special_token_frame
from pretrainax.data.objectives.base import Objective, Statistic
from pretrainax.data.objectives.masking_units import Chosen, MaskUnit, Runs, Tokens, WholeWords
from pretrainax.data.objectives.tolerances import binomial_tolerance, one_sided_tolerance
from pretrainax.data.words import SimilarWords
from pretrainax.tokenization.frames import RowFrame, SpecialTokenFrame


def frame_of(vocabulary) -> SpecialTokenFrame:
    """Returns the special tokens around the texts of a row, which tasks of encoders use, too."""
    return special_token_frame("encoder", vocabulary)


def check_room(objective: Objective, texts: int, vocabulary, sequence_length: int) -> None:
    """Raises UserError if a row has no room for the special tokens around `texts` texts and a token of each."""
    shortest = frame_of(vocabulary).count(texts) + texts
    if sequence_length < shortest:
        raise UserError(
            f"config.data.sequence_length is {sequence_length}, {type(objective).__name__} with the special tokens of "
            f"this tokenizer needs at least {shortest}"
        )


def _ordinary_ids(vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Returns which token ids are not special, both as a mask [V] bool and as an int32 array of these ids."""
    frame_ids = frozenset() if vocabulary.frame is None else frozenset(vocabulary.frame.ids)
    return _ids_except(vocabulary.size, vocabulary.special_ids | frame_ids)


@functools.lru_cache(maxsize=8)
def _ids_except(size: int, special_ids: frozenset[int]) -> tuple[np.ndarray, np.ndarray]:
    is_ordinary = np.ones(size, bool)
    is_ordinary[list(special_ids)] = False
    return is_ordinary, np.flatnonzero(is_ordinary).astype(np.int32)


@dataclasses.dataclass
class RateChange(Choice):
    """Changes the mask rate linearly from `MaskedLM.rate` to `to` as training progress goes from `begin` to `end`.

    If `begin` equals `end`, the rate changes abruptly. Ankner et al. 2023 (arXiv 2305.15096) decrease the rate from
    30 % to 15 % over the entire training run.
    """

    to: float = 0.15  # the final mask rate
    begin: float = 0.0  # training progress at which the change begins, from 0 to 1
    end: float = 1.0  # training progress at which the change ends, from 0 to 1


@dataclasses.dataclass
class MaskedLM(Objective):
    """BERT's cloze task (Devlin et al. 2018, section 3.1), with new masks in each epoch (Liu et al. 2019, section 4.1).

    The model predicts rate * n of the n ordinary (not special) tokens of a sequence, but at least one token. This
    number is rounded up or down at random so that it is exact on average. Each predicted token is replaced by [MASK]
    with probability `mask_fraction` and by a uniformly drawn ordinary token with probability `random_fraction`.
    Otherwise, the token stays unchanged. Special tokens are neither predicted nor drawn. With a rate of 0.3, `my dog is
    hairy and it barks` may become

        tokens             [CLS] my  dog  is  [MASK]  and  apple  barks  [SEP]
        masked_positions   4      6
        targets            hairy  it
        loss_weights       1      1

    The model computes its head only at `masked_positions`. A row has K = ceil(rate * T) slots for predictions (BERT's
    max_predictions_per_seq). Unused slots have weight 0, position 0 and target 0. If the rate changes, K is computed
    from the highest rate. Sequences may cross document boundaries, as in RoBERTa's FULL-SENTENCES.

    With `similar_words`, words are replaced with a similar word of the same number of tokens instead of [MASK]
    (MacBERT: Cui et al. 2020, arXiv 2004.13922, section 3.2), or with random tokens if they have no similar word.
    """

    rate: float = 0.15  # fraction of the ordinary (not special) tokens that are predicted
    mask_fraction: float = 0.8  # fraction of the predicted tokens that are replaced with [MASK]
    random_fraction: float = 0.1  # fraction of the predicted tokens that are replaced with a random token
    mask_unit: MaskUnit = dataclasses.field(default_factory=Tokens)  # Tokens() | WholeWords() | NGrams() | Spans()
    rate_change: Optional[RateChange] = None  # RateChange(): `rate` is only the initial rate
    similar_words: Optional[str] = None  # path of a JSON file {word: [similar word, …]}; None: use [MASK]
    # True: the same mask in every epoch; False: a new mask (RoBERTa). BERT has 10 masks, each for 4 of 40 epochs
    # (create_pretraining_data.py, dupe_factor)
    static: bool = False

    families: ClassVar[tuple[str, ...]] = ("encoder",)
    special_tokens: ClassVar[tuple[str, ...]] = ("mask", "cls", "sep")
    replaced_by_frame: ClassVar[tuple[str, ...]] = ("cls", "sep")
    tokenizers: ClassVar[str] = "WordPiece, ByteBPE with special_pieces roberta or bert, or Unigram with albert"
    shortest: ClassVar[int] = 3  # [CLS], a token, [SEP]
    replaced_tokens: ClassVar[bool] = False  # True: the objective requires a model with a replaced_token_head

    _similar_words: ClassVar[Optional[SimilarWords]] = None  # set by `bind`
    _frame: ClassVar[SpecialTokenFrame] = SpecialTokenFrame(RowFrame((-1,), (), (-1,)), None)  # set by `bind`

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
        """Yields error lines about an invalid `rate_change`."""
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
            status = "has a" if experiment.model.replaced_token_head else "has no"
            alternative = "MaskedLM" if self.replaced_tokens else "ReplacedTokenDetection"
            yield (
                f"config.objective is {type(self).__name__}, config.model {status} replaced_token_head: set "
                f"config.objective to {alternative}"
            )

    def check_vocabulary(self, vocabulary, sequence_length):
        super().check_vocabulary(vocabulary, sequence_length)
        check_room(self, 1, vocabulary, sequence_length)

    def bind(self, tokenizer):
        bound = copy.copy(self)
        bound.mask_unit, bound._frame = self.mask_unit.bind(tokenizer), frame_of(tokenizer.vocabulary)
        if self.similar_words is not None:
            bound._similar_words = SimilarWords(tokenizer, self.similar_words)
        return bound

    @property
    def head_metrics(self) -> tuple[str, ...]:
        """Returns the losses at masked, random and unchanged positions, if the objective makes such positions."""
        fractions = self.mask_fraction, self.random_fraction, 1 - self.mask_fraction - self.random_fraction
        if self.similar_words is not None:  # similar or random words are in place of [MASK]
            fractions = 0.0, fractions[0] + fractions[1], fractions[2]
        return tuple(f"{kind}_loss" for kind, fraction in zip(REPLACEMENTS, fractions, strict=True) if fraction > 1e-9)

    @property
    def rates(self) -> tuple[float, float]:
        """Returns the lowest and the highest mask rate during training."""
        final_rate = self.rate if self.rate_change is None else self.rate_change.to
        return min(self.rate, final_rate), max(self.rate, final_rate)

    def rate_at(self, progress: float) -> float:
        """Returns the mask rate at `progress`, the training progress from 0 to 1."""
        change = self.rate_change
        if change is None or progress < change.begin:
            return self.rate
        if progress >= change.end:
            return change.to
        return self.rate + (change.to - self.rate) * (progress - change.begin) / (change.end - change.begin)

    def with_settings_between(self, begin, end):
        objective = copy.copy(self)
        objective.rate, objective.rate_change = self.rate_at(begin), RateChange(to=self.rate_at(end))
        return objective

    def lengths(self, sequence_length):
        raw = sequence_length - self._frame.count(1)
        return Lengths(raw, inputs=sequence_length, targets=self._max_predicted(sequence_length))

    def measure(self, raw):
        return Lengths(raw, inputs=raw + self._frame.count(1), targets=self._max_predicted(raw))

    @property
    def has_own_sizes(self):
        return self._frame.count(1) != MaskedLM._frame.count(1)

    def _max_predicted(self, tokens: int) -> int:
        """Returns the maximum number of predicted tokens in a sequence of `tokens` tokens, at the highest mask rate."""
        return max(math.ceil(self.rates[1] * tokens - 1e-6), 1)  # 0.07 * 100 is 7.000000000000001

    def example(self, text, rng, vocabulary):
        frame = frame_of(vocabulary).single
        start, end = len(frame.before), len(frame.before) + len(text.tokens)
        length = end + len(frame.after)
        row = np.empty(length, np.int32)
        row[:start], row[start:end], row[end:] = frame.before, text.tokens, frame.after
        return {
            **self.mask(row, rng, vocabulary, text.progress),
            "segment_ids": np.ones(length, np.int32),
            "positions": np.arange(length, dtype=np.int32),
            "token_types": np.zeros(length, np.int32),
        }

    def mask(self, row: np.ndarray, rng: np.random.Generator, vocabulary, progress: float = 1.0) -> dict:
        """Masks a sequence, and returns the masked "tokens" and the arrays that describe the predictions.

        Args:
          row: [n] int32, the sequence with its special tokens.
          progress: training progress from 0 to 1, on which the mask rate may depend.
        """
        is_ordinary, ordinary_ids = _ordinary_ids(vocabulary)
        is_ordinary_token = is_ordinary.take(row)
        count = np.count_nonzero(is_ordinary_token)
        if count:
            budget = int(self.rate_at(progress) * count + rng.random())
            chosen = self.mask_unit.choose(row, is_ordinary_token, min(max(budget, 1), self._max_predicted(count)), rng)
        else:
            chosen = Chosen(np.zeros(0, np.int64), np.zeros(0, np.int64))
        positions, masked_row = chosen.places, row.copy()
        targets = row[positions]
        masked_row[positions] = self._replacement_ids(row, targets, chosen, rng, ordinary_ids, vocabulary.mask)
        return {
            "tokens": masked_row,
            "masked_positions": positions.astype(np.int32),
            "targets": targets,
            "loss_weights": np.ones(len(positions), np.float32),
        }

    def _replacement_ids(self, row, targets, chosen, rng, ordinary_ids, mask) -> np.ndarray:
        """Draws the ids that replace the predicted tokens, [k] int32; `targets` [k] are the original ids."""
        kind_draws, token_draws = rng.random((2, len(targets)))
        word_numbers = None
        if self._similar_words is not None:
            word_numbers = self.mask_unit.starts(row)[chosen.places].cumsum() - 1  # [k], from 0
        if self.mask_unit.shares_replacement:
            kind_draws = kind_draws[np.unique(chosen.spans, return_inverse=True)[1]]
        elif word_numbers is not None:
            kind_draws = kind_draws[word_numbers]
        replacements, is_masked = targets.copy(), kind_draws < self.mask_fraction
        if word_numbers is not None or self.random_fraction:
            random_ids = ordinary_ids.take((token_draws * len(ordinary_ids)).astype(np.intp))
            np.putmask(replacements, kind_draws < self.mask_fraction + self.random_fraction, random_ids)
        if word_numbers is None:
            np.putmask(replacements, is_masked, mask)
            return replacements
        ends = np.flatnonzero(np.diff(word_numbers, append=-1)) + 1  # [w], the end of each word in `targets`
        for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            similar = self._similar_words.similar_to(tuple(targets[start:end].tolist())) if is_masked[start] else ()
            if similar:
                replacements[start:end] = similar[int(token_draws[start] * len(similar))]
        return replacements

    def restore(self, example, vocabulary):
        frame, row = frame_of(vocabulary).single, _original_tokens(example)
        return row[len(frame.before) : len(row) - len(frame.after)]

    def token_offsets(self, example, vocabulary):
        return np.arange(len(example["tokens"])) - len(frame_of(vocabulary).single.before)

    def warnings_of(self, experiment, batches):
        yield from super().warnings_of(experiment, batches)
        objectives = [stream.objective for stream in batches.streams]
        if any(isinstance(objective, MaskedLM) and not objective._frame.count(1) for objective in objectives):
            yield (
                "NO SPECIAL TOKENS: the tokenizer adds none around a text, so rows have no [CLS] and no [SEP]; set the "
                "post_processor of its tokenizer.json to add them"
            )

    def statistics(self, examples, vocabulary):
        yield from _rate_statistic(self, examples, vocabulary)
        yield from _replacement_statistics(self, examples, vocabulary)
        if isinstance(self.mask_unit, WholeWords):
            yield from _word_statistics(self, examples, vocabulary)


def _original_tokens(example) -> np.ndarray:
    """Returns the tokens of an example before masking, [n] int32."""
    row = example["tokens"].copy()
    row[example["masked_positions"]] = example["targets"]
    return row


def _rate_statistic(objective, examples, vocabulary):
    """Yields the statistic "mask rate": the fraction of the ordinary tokens of all examples that are predicted."""
    is_ordinary, _ = _ordinary_ids(vocabulary)
    min_rate, max_rate = objective.rates
    counts = np.array([np.count_nonzero(is_ordinary[_original_tokens(e)]) for e in examples])
    predicted = sum(len(e["targets"]) for e in examples)
    if not counts.any():
        return
    # Random rounding has a standard deviation of at most 1/2. Tiny sequences predict at least one token. With whole
    # words, the unused budget is less than the length of the shortest word that was not chosen.
    max_rounding = 5 * math.sqrt(len(counts)) / 2
    max_added, max_unused = np.maximum(1 - min_rate * counts, 0)[counts > 0].sum(), 0
    if isinstance(objective.mask_unit, WholeWords):
        for example in examples:
            sizes, predicted_sizes = _word_sizes(objective, example, vocabulary)
            unpredicted_sizes = sizes[(sizes > 0) & (predicted_sizes == 0)]
            max_unused += unpredicted_sizes.min() - 1 if len(unpredicted_sizes) else 0
    measured, expected, half_range = predicted / counts.sum(), (min_rate + max_rate) / 2, (max_rate - min_rate) / 2
    below, above = ((max_rounding + other) / counts.sum() + half_range for other in (max_unused, max_added))
    yield Statistic("mask rate", measured, expected, one_sided_tolerance(measured, expected, below, above))


def _word_sizes(objective, example, vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Counts the ordinary tokens and the predicted tokens of each word of an example, both [W] int64."""
    is_ordinary, _ = _ordinary_ids(vocabulary)
    row = _original_tokens(example)
    starts = np.flatnonzero(objective.mask_unit.starts(row))
    predicted = np.zeros(len(row), np.int64)
    predicted[example["masked_positions"]] = 1
    return np.add.reduceat(is_ordinary[row].astype(np.int64), starts), np.add.reduceat(predicted, starts)


def _replacement_statistics(objective, examples, vocabulary):
    """Yields the fractions of the predicted tokens that are masked, replaced with random tokens, and unchanged."""
    # The first two lists have an entry per predicted token, the third one per group of tokens that share a draw.
    is_masked, is_unchanged, sizes = [], [], []
    for example in examples:
        positions, targets = example["masked_positions"], example["targets"]
        if not len(positions):
            continue
        input_ids, group_starts = example["tokens"][positions], np.arange(len(positions))
        equals_target = input_ids == targets
        if objective.mask_unit.shares_replacement:
            group_starts = np.flatnonzero(np.diff(positions, prepend=-2) > 1)
        elif objective.similar_words is not None:
            group_starts = np.flatnonzero(objective.mask_unit.starts(_original_tokens(example))[positions])
        if objective.similar_words is not None:
            # A similar word may share a token with the original word, so only whole groups count as unchanged.
            equals_target = np.repeat(
                np.logical_and.reduceat(equals_target, group_starts), np.diff(group_starts, append=len(positions))
            )
        is_masked.append(input_ids == vocabulary.mask)
        is_unchanged.append(equals_target)
        sizes.append(np.diff(group_starts, append=len(positions)))
    if not is_unchanged:
        return
    sizes = np.concatenate(sizes)
    is_masked, is_unchanged = np.concatenate(is_masked), np.concatenate(is_unchanged)

    num_draws = sizes.sum() ** 2 / np.square(sizes).sum()  # effective number: large groups count for more
    # A random token that equals the original counts as unchanged.
    by_chance = objective.random_fraction / len(_ordinary_ids(vocabulary)[1])

    def statistic(name, measured, expected, by_chance=0.0):
        sampling = binomial_tolerance(num_draws, expected + by_chance)
        below, above = sampling + max(-by_chance, 0.0), sampling + max(by_chance, 0.0)
        measured = float(measured)
        return Statistic(name, measured, expected, one_sided_tolerance(measured, expected, below, above))

    mask_fraction, random_fraction = objective.mask_fraction, objective.random_fraction
    if objective.similar_words is None:
        yield statistic("masked", is_masked.mean(), mask_fraction)
        yield statistic("random", np.mean(~is_masked & ~is_unchanged), random_fraction, -by_chance)
    kept_fraction = round(1 - mask_fraction - random_fraction, 12)  # without rounding, 1 - 0.8 - 0.2 is not 0
    yield statistic("kept", is_unchanged.mean(), kept_fraction, by_chance)


def _word_statistics(objective, examples, vocabulary):
    """Yields statistics of the words with predicted tokens: what fraction is predicted in full, and mean run length."""
    words = [_word_sizes(objective, example, vocabulary) for example in examples]
    num_touched = num_complete = 0
    for sizes, predicted in words:
        # If no word fits the budget, only some tokens of a single word are predicted; this word is not counted.
        if np.count_nonzero(predicted) > 1 or np.any((sizes > 0) & (sizes <= predicted.sum())):
            num_touched += np.count_nonzero(predicted)
            num_complete += np.count_nonzero(predicted * (predicted == sizes))
    if num_touched:
        yield Statistic("words predicted whole", num_complete / num_touched, 1.0)
    if any(predicted.any() for _, predicted in words):
        yield _run_length_statistic(objective.mask_unit, words)


def _run_length_statistic(unit: WholeWords, words: list[tuple[np.ndarray, np.ndarray]]) -> Statistic:
    """Returns the statistic "words in a row": the mean number of words in a run of predicted words.

    For `Runs`, the expected value accounts for the last run of a sequence, which may be truncated.
    """
    if isinstance(unit, Runs):  # excludes sequences in which runs can hardly move
        words = [(sizes, predicted) for sizes, predicted in words if 5 * np.count_nonzero(predicted) <= 2 * len(sizes)]
    num_words = num_runs = max_added = max_merged = expected = variance = 0
    for sizes, predicted in words:
        is_predicted = predicted > 0
        count = np.count_nonzero(is_predicted)
        ends = np.flatnonzero(np.diff(is_predicted.astype(np.int8), append=0) == -1)
        num_words, num_runs = num_words + count, num_runs + len(ends)
        if isinstance(unit, Runs):
            run_mean, run_variance = unit.runs_of(int(count))
            expected, variance = expected + run_mean, variance + run_variance
            # Runs of long words may not use the whole budget. The remaining budget goes to another word, which starts
            # a new run or joins other runs. A special token or the end of the sequence may also truncate a run.
            max_added += np.any(sizes > 1) + np.count_nonzero(np.append(sizes, 0)[ends + 1] == 0)
            max_merged += 2 * count / len(sizes)
    measured = num_words / max(num_runs, 1)
    if not expected:
        return Statistic("words in a row", measured)
    expected_length, max_deviation = num_words / expected, 5 * math.sqrt(variance)
    max_runs, min_runs = expected + max_deviation + max_added, max(expected - max_deviation - max_merged, 1)
    return Statistic(
        "words in a row",
        measured,
        expected_length,
        expected_length - num_words / max_runs
        if measured < expected_length
        else num_words / min_runs - expected_length,
    )
