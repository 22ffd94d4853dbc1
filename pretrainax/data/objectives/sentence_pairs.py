"""Defines sentence-pair objectives: masked language modelling and the classification of pairs of segments."""

import copy
import dataclasses
import math
from typing import ClassVar, NamedTuple

import numpy as np

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, Statistic, with_field_path
from pretrainax.data.objectives.masked import MaskedLM

_FRAME = 3  # [CLS] and two [SEP]
# Maximum draws until a segment of another document is long enough. Shorter random pairs would reveal their label.
_TRIES = 10


class Pair(NamedTuple):
    """Two segments [a], [b] int32, in the order of the row, and the label of the pair."""

    first: np.ndarray
    second: np.ndarray
    label: int


class SentencePairs(Objective):
    """Base class of sentence-pair objectives: rows [CLS] A [SEP] B [SEP] with token types, and a masked LM."""

    masking: MaskedLM
    short_fraction: float

    special_tokens: ClassVar[tuple[str, ...]] = MaskedLM.special_tokens
    tokenizers: ClassVar[str] = MaskedLM.tokenizers
    shortest: ClassVar[int] = _FRAME + 2
    unit: ClassVar[str] = "sentences"
    packs: ClassVar[bool] = False  # one label per row
    select_by: ClassVar[str] = "total_loss"  # the sum of both losses trains the encoder
    head_metrics: ClassVar[tuple[str, ...]] = ("pair_loss", "pair_accuracy", "total_loss")

    @property
    def static(self) -> bool:
        return self.masking.static

    def pair(self, tokens: np.ndarray, ends: np.ndarray, elsewhere, rng, vocabulary) -> Pair:
        """Returns two segments with a total of at most max(n, 2) tokens, and their label.

        Args:
          tokens: [n] int32, tokens of one document.
          ends: [s] int64, ends of the sentences; the last is n.
          elsewhere: Text.elsewhere, which draws a sequence from another document.
        """
        raise NotImplementedError

    def field_problems(self):
        if not 0 <= self.short_fraction <= 1:
            yield f"config.objective.short_fraction is {self.short_fraction}, it must be in [0, 1]"
        if isinstance(self.masking, MaskedLM):
            yield from with_field_path("masking", self.masking.field_problems())
        else:
            yield f"config.objective.masking is {type(self.masking).__name__}, it must be a MaskedLM"

    def problems(self, experiment):
        yield from super().problems(experiment)
        model, name = experiment.model, type(self).__name__
        if not model.pair_head:
            yield f"config.model.pair_head is False, {name} trains it: set it to True"
        if model.num_token_types == 1:
            yield f"config.model.num_token_types is 1, {name} has 2 types: set it to 2, or to 0 for none"

    def lengths(self, sequence_length):
        return Lengths(sequence_length - _FRAME, sequence_length, self.masking.lengths(sequence_length).targets)

    def measure(self, raw):
        pair = max(raw, 2)
        return Lengths(raw, pair + _FRAME, self.masking.measure(pair).targets)

    def bind(self, tokenizer):
        bound = copy.copy(self)
        bound.masking = self.masking.bind(tokenizer)
        return bound

    def between(self, begin, end):
        part = copy.copy(self)
        part.masking = self.masking.between(begin, end)
        return part

    def example(self, text, rng, vocabulary):
        tokens, ends = _sentences(text, vocabulary)
        if rng.random() < self.short_fraction:
            tokens, ends = _some_sentences(tokens, ends, int(rng.integers(2, max(len(tokens), 3))), 2, rng)
        first, second, label = self.pair(tokens, ends, text.elsewhere, rng, vocabulary)
        cls, sep = np.int32(vocabulary.cls), np.int32(vocabulary.sep)
        row = np.concatenate([[cls], first, [sep], second, [sep]])
        length = len(row)
        return {
            **self.masking.mask(row, rng, vocabulary, text.progress),
            "segment_ids": np.ones(length, np.int32),
            "positions": np.arange(length, dtype=np.int32),
            "token_types": np.repeat(np.arange(2, dtype=np.int32), [len(first) + 2, len(second) + 1]),
            "pair_labels": np.array(label, np.int32),
        }

    def segments(self, example) -> tuple[np.ndarray, np.ndarray]:
        """Returns the two segments of an example before masking, in the order of the row."""
        row = example["tokens"].copy()
        row[example["masked_positions"]] = example["targets"]
        middle = int(np.count_nonzero(example["token_types"] == 0))
        return row[1 : middle - 1], row[middle:-1]

    def statistics(self, examples, vocabulary):
        yield from self.masking.statistics(examples, vocabulary)
        yield Statistic("tokens of a pair", float(np.mean([len(e["tokens"]) - _FRAME for e in examples])))


def _sentences(text, vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens and the ends of the sentences of a text, without the separator of the document.

    A row has its own separators. The separator of the document stays if fewer than two tokens would remain, because a
    pair needs two tokens.
    """
    tokens, ends = text.tokens, text.parts
    if len(tokens) > 2 and tokens[-1] == vocabulary.separator:
        tokens = tokens[:-1]
        ends = np.unique(np.minimum(ends, len(tokens)))  # drops a last sentence that was only the separator
    return tokens, ends


def _some_sentences(tokens, ends, min_tokens: int, min_sentences: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Draws at least `min_sentences` consecutive sentences with at least `min_tokens` tokens; returns tokens and ends.

    The first sentence is drawn from the sentences with enough tokens after their start. If there are no such sentences,
    all sentences are returned.
    """
    begins = np.append(0, ends[:-1])
    choices = min(int(np.searchsorted(begins, ends[-1] - min_tokens, "right")), len(ends) + 1 - min_sentences)
    start = int(rng.integers(choices)) if choices > 0 else 0
    stop = max(int(np.searchsorted(ends, begins[start] + min_tokens)) + 1, start + min_sentences)
    ends = ends[start:stop]
    return tokens[begins[start] : ends[-1]], ends - begins[start]


def truncate_pair(first: np.ndarray, second: np.ndarray, room: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Truncates a pair to `room` tokens as BERT does: token by token from the longer segment, at a random side.

    Front and back have equal chances. If both segments are equally long, the second segment loses a token. One step
    suffices, because the number of tokens that are removed in front has a binomial distribution.
    """
    keep_first = min(len(first), max(room - len(second), (room + 1) // 2))
    keep_second = min(len(second), room - keep_first)
    return _cut(first, keep_first, rng), _cut(second, keep_second, rng)


def _cut(tokens: np.ndarray, keep: int, rng) -> np.ndarray:
    """Returns `keep` consecutive tokens; the number of tokens removed in front is binomial."""
    front = int(rng.binomial(len(tokens) - keep, 0.5)) if len(tokens) > keep else 0
    return tokens[front : front + keep]


@dataclasses.dataclass
class NextSentencePrediction(SentencePairs):
    """BERT's next sentence prediction: classifies whether B follows A (Devlin et al. 2018, section 3.1, appendix A.2).

    In half of the pairs, B follows A in its document (label 0). In the other half, B is text of another document
    (label 1). The sentences `the man went to the store`, `he bought a gallon of milk` and, in another document,
    `penguin ##s are flight ##less birds`, with one mask each, become the examples of the paper:

        tokens        [CLS] the man went to [MASK] store [SEP] he bought a gallon [MASK] milk [SEP]
        token_types    0    0   0   0    0  0      0     0     1  1      1 1      1      1    1
        pair_labels   0

        tokens        [CLS] the man [MASK] to the store [SEP] penguin [MASK] are flight ##less birds [SEP]
        token_types    0    0   0   0      0  0   0     0     1       1      1   1      1      1     1
        pair_labels   1

    The lengths follow the released code. A sequence is a run of sentences of one document that fits into a row. One in
    ten (`short_fraction`) is shortened to a random number of tokens, from 2 to its length, in whole sentences. A ends
    after a random number of sentences. B is the rest, or the same number of tokens from sentences of another document.
    Both kinds of pairs are then truncated token by token, from the longer segment, at a random end.

    If a sequence is a single sentence, B is always from another document, as in BERT. With such sequences, more than
    half of the labels are 1.

    NOTE BERT collects sentences until they are too long for a row and truncates the excess, half a sentence on average.
    Sequences are never too long here. Both kinds of pairs lose a random number of tokens, below the length of the last
    sentence, because truncating only random pairs would reveal them. The text after A that a random B replaces is
    unused until another epoch; in BERT it begins the next pair. A shortened sequence has two sentences if possible.
    """

    masking: MaskedLM = dataclasses.field(default_factory=MaskedLM)  # masked LM over both segments
    short_fraction: float = 0.1  # fraction of the sequences that are shortened

    families: ClassVar[tuple[str, ...]] = ("encoder",)
    pairs_documents: ClassVar[bool] = True

    def pair(self, tokens, ends, elsewhere, rng, vocabulary):
        if len(ends) == 1:
            first, room, follows = tokens, max(len(tokens), 2), False
        else:
            middle = ends[rng.integers(len(ends) - 1)]
            first, second = tokens[:middle], tokens[middle:]
            room = len(tokens) - int(rng.integers(ends[-1] - ends[-2]))
            follows = rng.random() < 0.5
        if not follows:
            for _ in range(_TRIES):
                others, other_ends = _sentences(elsewhere(rng), vocabulary)
                if len(others) >= room - len(first):
                    break
            second, _ = _some_sentences(others, other_ends, room - len(first), 1, rng)
        return Pair(*truncate_pair(first, second, room, rng), int(not follows))

    def restore(self, example, vocabulary):
        """Returns A and B in the order of the document; only A if B is from another document."""
        first, second = self.segments(example)
        return first if example["pair_labels"] else np.concatenate([first, second])

    def statistics(self, examples, vocabulary):
        yield from super().statistics(examples, vocabulary)
        share = float(np.mean([e["pair_labels"] for e in examples]))
        tolerance = 2.5 / math.sqrt(len(examples))  # 5 standard deviations of a fair coin
        if share > 0.5:  # single sentences raise the share, but almost no pair in order leaves nothing to learn
            tolerance = max(tolerance, 0.45)
        yield Statistic("random next sentences", share, 0.5, tolerance)


@dataclasses.dataclass
class SentenceOrderPrediction(SentencePairs):
    """ALBERT's sentence order prediction: classifies whether A and B are in order (Lan et al. 2019, section 3.1).

    A and B are consecutive segments of one document, in order (label 0) or, in half of the pairs, swapped (label 1).
    `the man went to the store` and `he bought a gallon of milk`, swapped, become

        tokens        [CLS] he bought a gallon [MASK] milk [SEP] the man went to [MASK] store [SEP]
        token_types    0    0  0      0 0      0      0    0     1   1   1    1  1      1     1
        pair_labels   1

    A sequence is a run of sentences of one document that fits into a row. One in ten is shortened, as in
    NextSentencePrediction (section 4.1). It is split after a random number of sentences. A single sentence is split
    after a random number of tokens: it has an order too, so half of the labels are 1 for any corpus. (For a single
    sentence, ALBERT's code takes B from another document and labels it as swapped.) A sequence of a single token has no
    example.
    """

    masking: MaskedLM = dataclasses.field(default_factory=MaskedLM)  # masked LM over both segments
    short_fraction: float = 0.1  # fraction of the sequences that are shortened

    families: ClassVar[tuple[str, ...]] = ("encoder",)

    def measure(self, raw):
        return super().measure(raw) if raw > 1 else Lengths(raw, 0, 0)

    def pair(self, tokens, ends, elsewhere, rng, vocabulary):
        middle = ends[rng.integers(len(ends) - 1)] if len(ends) > 1 else rng.integers(1, len(tokens))
        first, second = tokens[:middle], tokens[middle:]
        return Pair(second, first, 1) if rng.random() < 0.5 else Pair(first, second, 0)

    def restore(self, example, vocabulary):
        """Returns both segments in the order of the document."""
        segments = self.segments(example)
        return np.concatenate(segments[::-1] if example["pair_labels"] else segments)

    def statistics(self, examples, vocabulary):
        yield from super().statistics(examples, vocabulary)
        share = float(np.mean([e["pair_labels"] for e in examples]))
        yield Statistic("swapped segments", share, 0.5, 2.5 / math.sqrt(len(examples)))  # 5 standard deviations
