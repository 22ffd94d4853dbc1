"""Sentence pairs: what belongs together, beside the words that are masked."""

import copy
import dataclasses
import math
from typing import ClassVar, NamedTuple

import numpy as np

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, Statistic, of_field
from pretrainax.data.objectives.masked import MaskedLM

_FRAME = 3  # [CLS] and two [SEP]
_TRIES = 10  # to find a text elsewhere that is long enough: were random pairs shorter, their length would tell


class Pair(NamedTuple):
    """Two segments [a], [b] int32, in the order of the row."""

    first: np.ndarray
    second: np.ndarray
    label: int


class SentencePairs(Objective):
    """Base of both: the row [CLS] A [SEP] B [SEP] with its token types, and a masked LM over it."""

    masking: MaskedLM
    short_fraction: float

    special_tokens: ClassVar[tuple[str, ...]] = MaskedLM.special_tokens
    tokenizers: ClassVar[str] = MaskedLM.tokenizers
    shortest: ClassVar[int] = _FRAME + 2
    unit: ClassVar[str] = "sentences"
    packs: ClassVar[bool] = False  # one label a row
    select_by: ClassVar[str] = "total_loss"  # the one encoder learns both, and is trained by their sum
    head_figures: ClassVar[tuple[str, ...]] = ("pair_loss", "pair_accuracy", "total_loss")

    @property
    def static(self) -> bool:
        return self.masking.static

    def pair(self, tokens: np.ndarray, ends: np.ndarray, elsewhere, rng, vocabulary) -> Pair:
        """Returns two segments of at most max(n, 2) tokens together.

        Args:
          tokens: [n] int32, of one document.
          ends: [s] int64, where the sentences end, the last at n.
          elsewhere: Text.elsewhere.
        """
        raise NotImplementedError

    def field_problems(self):
        if not 0 <= self.short_fraction <= 1:
            yield f"config.objective.short_fraction is {self.short_fraction}, it must be in [0, 1]"
        if isinstance(self.masking, MaskedLM):
            yield from of_field("masking", self.masking.field_problems())
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
        """Returns the two segments of an example as they were before masking, in the order of the row."""
        row = example["tokens"].copy()
        row[example["masked_positions"]] = example["targets"]
        middle = int(np.count_nonzero(example["token_types"] == 0))
        return row[1 : middle - 1], row[middle:-1]

    def statistics(self, examples, vocabulary):
        yield from self.masking.statistics(examples, vocabulary)
        yield Statistic("tokens of a pair", float(np.mean([len(e["tokens"]) - _FRAME for e in examples])))


def _sentences(text, vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and ends of the sentences of a text, without the separator of its document: the row has its own.

    It stays where without it there would be no two tokens to make a pair of.
    """
    tokens, ends = text.tokens, text.parts
    if len(tokens) > 2 and tokens[-1] == vocabulary.separator:
        tokens = tokens[:-1]
        ends = np.unique(np.minimum(ends, len(tokens)))  # a last sentence of the separator alone is none
    return tokens, ends


def _some_sentences(tokens, ends, wanted: int, least: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Draws sentences in a row, their tokens and ends: as few as have `wanted` tokens, and no fewer than `least`.

    The first one is drawn from those behind which there is enough; where there never is, these are all sentences.
    """
    begins = np.append(0, ends[:-1])
    choices = min(int(np.searchsorted(begins, ends[-1] - wanted, "right")), len(ends) + 1 - least)
    start = int(rng.integers(choices)) if choices > 0 else 0
    stop = max(int(np.searchsorted(ends, begins[start] + wanted)) + 1, start + least)
    ends = ends[start:stop]
    return tokens[begins[start] : ends[-1]], ends - begins[start]


def truncate_pair(first: np.ndarray, second: np.ndarray, room: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Cuts a pair as BERT does: token by token from the longer segment, at its front or back as a coin falls.

    Of two equally long ones the second gives the token. Done in one go: how many go in front of a segment is binomial.
    """
    keep_first = min(len(first), max(room - len(second), (room + 1) // 2))
    keep_second = min(len(second), room - keep_first)
    return _cut(first, keep_first, rng), _cut(second, keep_second, rng)


def _cut(tokens: np.ndarray, keep: int, rng) -> np.ndarray:
    front = int(rng.binomial(len(tokens) - keep, 0.5)) if len(tokens) > keep else 0
    return tokens[front : front + keep]


@dataclasses.dataclass
class NextSentencePrediction(SentencePairs):
    """BERT's second task: does B follow A? (Devlin et al. 2018, section 3.1 and appendix A.2).

    Half of the time B is what follows A in its document (label 0), half of the time text of another one (label 1). Of
    the sentences `the man went to the store`, `he bought a gallon of milk` and, elsewhere, `penguin ##s are flight
    ##less birds`, with a mask each, come the paper's

        tokens        [CLS] the man went to [MASK] store [SEP] he bought a gallon [MASK] milk [SEP]
        token_types    0    0   0   0    0  0      0     0     1  1      1 1      1      1    1
        pair_labels   0

        tokens        [CLS] the man [MASK] to the store [SEP] penguin [MASK] are flight ##less birds [SEP]
        token_types    0    0   0   0      0  0   0     0     1       1      1   1      1      1     1
        pair_labels   1

    The lengths follow the released code. A text is a run of sentences of one document that fits into a row; of one in
    ten only some are taken, enough for a number of tokens drawn from 2 to its length (`short_fraction`). A ends after a
    random number of sentences. B is the others, or as many tokens of sentences elsewhere. Then pairs of either kind
    are truncated token by token, from the longer segment, at a random end.

    Where a text is a single sentence nothing follows, and B is always of another document, as in BERT: more than half
    of the labels are then 1.

    NOTE BERT collects sentences until they are too long for a row and truncates the excess, half a sentence on
    average. Texts are not too long here, and so truncated by a number drawn below the length of their last sentence:
    if only random pairs were truncated, that would tell them apart. What A leaves unused of a text before a random B
    waits for another epoch; in BERT it begins the next pair. And a short text has two sentences if there are two.
    """

    masking: MaskedLM = dataclasses.field(default_factory=MaskedLM)  # of both segments
    short_fraction: float = 0.1  # of the texts are shortened

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
        """Returns A and B as they stood in the document; A alone where B is of another one."""
        first, second = self.segments(example)
        return first if example["pair_labels"] else np.concatenate([first, second])

    def statistics(self, examples, vocabulary):
        yield from super().statistics(examples, vocabulary)
        share = float(np.mean([e["pair_labels"] for e in examples]))
        tolerance = 2.5 / math.sqrt(len(examples))  # 5 standard deviations of a fair coin
        if share > 0.5:  # as single sentences make it; but with hardly any pair in order there is nothing to learn
            tolerance = max(tolerance, 0.45)
        yield Statistic("random next sentences", share, 0.5, tolerance)


@dataclasses.dataclass
class SentenceOrderPrediction(SentencePairs):
    """ALBERT's second task: are A and B in order? (Lan et al. 2019, section 3.1).

    A and B are consecutive segments of one document, in its order (label 0) or, half of the time, swapped (label 1).
    `the man went to the store` and `he bought a gallon of milk`, swapped, become

        tokens        [CLS] he bought a gallon [MASK] milk [SEP] the man went to [MASK] store [SEP]
        token_types    0    0  0      0 0      0      0    0     1   1   1    1  1      1     1
        pair_labels   1

    A text is a run of sentences of one document that fits into a row; one in ten is shortened, as in
    NextSentencePrediction (section 4.1). It is parted after a random number of sentences, and a single sentence after a
    random number of tokens: it has an order too, and half of the labels are 1 whatever the corpus. (ALBERT's code
    takes another document for B there, and calls that swapped.) A text of a single token has no example.
    """

    masking: MaskedLM = dataclasses.field(default_factory=MaskedLM)  # of both segments
    short_fraction: float = 0.1  # of the texts are shortened

    families: ClassVar[tuple[str, ...]] = ("encoder",)

    def measure(self, raw):
        return super().measure(raw) if raw > 1 else Lengths(raw, 0, 0)

    def pair(self, tokens, ends, elsewhere, rng, vocabulary):
        middle = ends[rng.integers(len(ends) - 1)] if len(ends) > 1 else rng.integers(1, len(tokens))
        first, second = tokens[:middle], tokens[middle:]
        return Pair(second, first, 1) if rng.random() < 0.5 else Pair(first, second, 0)

    def restore(self, example, vocabulary):
        """Returns the text that was parted, in its order."""
        segments = self.segments(example)
        return np.concatenate(segments[::-1] if example["pair_labels"] else segments)

    def statistics(self, examples, vocabulary):
        yield from super().statistics(examples, vocabulary)
        share = float(np.mean([e["pair_labels"] for e in examples]))
        yield Statistic("swapped segments", share, 0.5, 2.5 / math.sqrt(len(examples)))  # 5 standard deviations
