"""Defines sentence-pair objectives, which combine masked language modelling with classifying segment pairs."""

import copy
import dataclasses
from typing import ClassVar, NamedTuple

import numpy as np

from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.base import Objective, Statistic, with_field_path
from pretrainax.data.objectives.masked import MaskedLM, check_room, frame_of
from pretrainax.data.objectives.tolerances import ROUNDING_ERROR, binomial_tolerance
from pretrainax.tokenization.frames import RowFrame, SpecialTokenFrame

# Maximum number of draws until a segment from another document is long enough. If pairs with a random second segment
# were shorter, their length would reveal the label.
_MAX_DRAWS = 10
# Maximum fraction of sequences of one sentence: with more, less than 5 % of the pairs are in order.
_MAX_SINGLE_FRACTION = 0.9


class Pair(NamedTuple):
    """Two segments of token ids, [a] and [b] int32, in the order in which the row has them, and the pair's label."""

    first: np.ndarray
    second: np.ndarray
    label: int


class SentencePairs(Objective):
    """Base class of sentence-pair objectives: rows [CLS] A [SEP] B [SEP] with token types and masked tokens.

    If the tokenizer was imported, a row has the special tokens that the tokenizer adds to a pair.
    """

    masking: MaskedLM
    short_fraction: float

    special_tokens: ClassVar[tuple[str, ...]] = MaskedLM.special_tokens
    replaced_by_frame: ClassVar[tuple[str, ...]] = MaskedLM.replaced_by_frame
    tokenizers: ClassVar[str] = MaskedLM.tokenizers
    shortest: ClassVar[int] = 5  # [CLS] and two [SEP], and a token between them
    unit: ClassVar[str] = "sentences"
    packs: ClassVar[bool] = False  # one label per row
    select_by: ClassVar[str] = "total_loss"  # sum of the masked LM loss and the pair loss

    _frame: ClassVar[SpecialTokenFrame] = SpecialTokenFrame(RowFrame(), RowFrame((-1,), (-1,), (-1,)))  # set by `bind`

    @property
    def static(self) -> bool:
        return self.masking.static

    @property
    def head_metrics(self) -> tuple[str, ...]:
        return "pair_loss", "pair_accuracy", "total_loss", *self.masking.head_metrics

    def pair(self, tokens: np.ndarray, ends: np.ndarray, elsewhere, rng, vocabulary) -> Pair:
        """Builds two segments with at most max(n, 2) tokens in total, and their label.

        Args:
          tokens: [n] int32, consecutive tokens of one document.
          ends: [s] int64, end offsets of the sentences in `tokens`; the last offset is n.
          elsewhere: `ObjectiveInput.draw_other_document`, which draws a sequence from another document.
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
        return Lengths(
            sequence_length - self._frame.count(2), sequence_length, self.masking.lengths(sequence_length).targets
        )

    def measure(self, raw):
        pair = max(raw, 2)
        return Lengths(raw, pair + self._frame.count(2), self.masking.measure(pair).targets)

    def check_vocabulary(self, vocabulary, sequence_length):
        super().check_vocabulary(vocabulary, sequence_length)
        check_room(self, 2, vocabulary, sequence_length)

    def bind(self, tokenizer):
        bound = copy.copy(self)
        bound.masking = self.masking.bind(tokenizer)
        bound._frame = _frame_of_pairs(tokenizer.vocabulary)  # pyright: ignore
        return bound

    @property
    def has_own_sizes(self):
        return self._frame.count(2) != SentencePairs._frame.count(2)

    def with_settings_between(self, begin, end):
        objective = copy.copy(self)
        objective.masking = self.masking.with_settings_between(begin, end)
        return objective

    def example(self, text, rng, vocabulary):
        tokens, ends = _without_separator(text, vocabulary)
        if rng.random() < self.short_fraction:
            tokens, ends = _draw_sentences(tokens, ends, int(rng.integers(2, max(len(tokens), 3))), 2, rng)
        first, second, label = self.pair(tokens, ends, text.draw_other_document, rng, vocabulary)
        row, token_types = _frame_of_pairs(vocabulary).wrap([first, second])
        length = len(row)
        return {
            **self.masking.mask(row, rng, vocabulary, text.progress),
            "segment_ids": np.ones(length, np.int32),
            "positions": np.arange(length, dtype=np.int32),
            "token_types": token_types,
            "pair_labels": np.array(label, np.int32),
        }

    def segments(self, example) -> tuple[np.ndarray, np.ndarray]:
        """Returns the two segments of an example as they were before masking, in the order of the row."""
        row, (before, between, after, _) = example["tokens"].copy(), self._frame.row(2)
        row[example["masked_positions"]] = example["targets"]
        middle = int(np.count_nonzero(example["token_types"] == 0))
        return row[len(before) : middle - len(between)], row[middle : len(row) - len(after)]

    def statistics(self, examples, vocabulary):
        yield from self.masking.statistics(examples, vocabulary)
        yield Statistic("tokens of a pair", float(np.mean([len(e["tokens"]) for e in examples])) - self._frame.count(2))


def _frame_of_pairs(vocabulary) -> SpecialTokenFrame:
    """Returns the special tokens of a row, whose two segments always have different token types."""
    frame = frame_of(vocabulary)
    return frame._replace(pair=frame.row(2)._replace(types=()))


def _without_separator(text, vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Returns a text's tokens and the end offsets of its sentences, without the document separator.

    The row has [SEP] tokens instead. The document separator is kept if fewer than two tokens would remain, because a
    pair needs at least two.
    """
    tokens, ends = text.tokens, text.parts
    if len(tokens) > 2 and tokens[-1] == vocabulary.separator:
        tokens = tokens[:-1]
        ends = np.unique(np.minimum(ends, len(tokens)))  # drops a last sentence that was only the separator
    return tokens, ends


def _draw_sentences(tokens, ends, min_tokens: int, min_sentences: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Draws at least `min_sentences` consecutive sentences with at least `min_tokens` tokens in total.

    The first sentence is drawn from those that still have enough tokens and sentences from their start onward. If there
    are none, returns all sentences.

    Returns:
      The tokens of the drawn sentences, and each sentence's end offset in these tokens.
    """
    starts = np.append(0, ends[:-1])
    num_choices = min(int(np.searchsorted(starts, ends[-1] - min_tokens, "right")), len(ends) + 1 - min_sentences)
    first = int(rng.integers(num_choices)) if num_choices > 0 else 0
    last = max(int(np.searchsorted(ends, starts[first] + min_tokens)) + 1, first + min_sentences)
    ends = ends[first:last]
    return tokens[starts[first] : ends[-1]], ends - starts[first]


def truncate_pair(first: np.ndarray, second: np.ndarray, room: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Truncates a pair to `room` tokens as BERT does, token by token, from the start or the end of the longer segment.

    Start and end are equally likely. If both segments are equally long, BERT truncates the second one. Instead of
    looping, this function draws the number of tokens to remove from the start from a binomial distribution.
    """
    first_size = min(len(first), max(room - len(second), (room + 1) // 2))
    second_size = min(len(second), room - first_size)
    return _truncate(first, first_size, rng), _truncate(second, second_size, rng)


def _truncate(tokens: np.ndarray, size: int, rng) -> np.ndarray:
    """Truncates a segment to `size` tokens; the number removed from its start is binomially distributed."""
    num_removed = int(rng.binomial(len(tokens) - size, 0.5)) if len(tokens) > size else 0
    return tokens[num_removed : num_removed + size]


@dataclasses.dataclass
class NextSentencePrediction(SentencePairs):
    """BERT's next sentence prediction: classifies whether B follows A (Devlin et al. 2018, section 3.1, appendix A.2).

    In half of the pairs, B follows A in its document (label 0). In the other half, B comes from another document
    (label 1). The sentences `the man went to the store`, `he bought a gallon of milk` and, in another document,
    `penguin ##s are flight ##less birds`, with one mask each, become the examples of the paper:

        tokens        [CLS] the man went to [MASK] store [SEP] he bought a gallon [MASK] milk [SEP]
        token_types    0    0   0   0    0  0      0     0     1  1      1 1      1      1    1
        pair_labels   0

        tokens        [CLS] the man [MASK] to the store [SEP] penguin [MASK] are flight ##less birds [SEP]
        token_types    0    0   0   0      0  0   0     0     1       1      1   1      1      1     1
        pair_labels   1

    The lengths follow BERT's released code. A sequence consists of consecutive sentences of one document that fit into
    a row. A fraction of the sequences (`short_fraction`) is shortened to whole sentences with at least a random number
    of tokens, from 2 to the length of the sequence. A ends after a random number of sentences. B consists of the
    remaining sentences, or of as many tokens from sentences of another document. Then every pair is truncated token by
    token, from the start or the end of the longer segment.

    If a sequence is a single sentence, B always comes from another document, as in BERT, so a corpus with such
    sequences has label 1 in more than half of the pairs.

    NOTE BERT collects sentences until they are too long for a row and truncates the excess, half a sentence on average.
    Here, sequences are never too long. Every pair loses a random number of tokens, less than the length of the last
    sentence, because truncating only pairs with a random B would reveal their label. If a random B replaces the
    sentences after A, these sentences stay unused in this epoch. In BERT, they begin the next pair. A shortened
    sequence has at least two sentences if possible.
    """

    masking: MaskedLM = dataclasses.field(default_factory=MaskedLM)  # masked LM over both segments
    short_fraction: float = 0.1  # fraction of the sequences that are shortened

    families: ClassVar[tuple[str, ...]] = ("encoder",)
    pairs_documents: ClassVar[bool] = True

    def pair(self, tokens, ends, elsewhere, rng, vocabulary):
        if len(ends) == 1:
            first, max_tokens, follows = tokens, max(len(tokens), 2), False
        else:
            middle = ends[rng.integers(len(ends) - 1)]
            first, second = tokens[:middle], tokens[middle:]
            max_tokens = len(tokens) - int(rng.integers(ends[-1] - ends[-2]))
            follows = rng.random() < 0.5
        if not follows:
            for _ in range(_MAX_DRAWS):
                other_tokens, other_ends = _without_separator(elsewhere(rng), vocabulary)
                if len(other_tokens) >= max_tokens - len(first):
                    break
            second, _ = _draw_sentences(other_tokens, other_ends, max_tokens - len(first), 1, rng)
        return Pair(*truncate_pair(first, second, max_tokens, rng), int(not follows))

    def restore(self, example, vocabulary):
        """Returns the tokens of A and B in document order, or only those of A if B comes from another document."""
        first, second = self.segments(example)
        return first if example["pair_labels"] else np.concatenate([first, second])

    def input_statistics(self, examples, inputs, vocabulary):
        """Yields the fraction of random pairs, and of sequences of one sentence, whose second segment is random."""
        is_single = np.array([len(_without_separator(text, vocabulary)[1]) == 1 for text in inputs])
        labels, num_free = np.array([e["pair_labels"] for e in examples]), int(np.count_nonzero(~is_single))
        expected = 1.0 - num_free / 2 / len(labels)
        tolerance = binomial_tolerance(num_free, 0.5) * num_free / len(labels) if num_free else ROUNDING_ERROR
        yield Statistic("random next sentences", float(labels.mean()), expected, tolerance)
        yield Statistic(
            "sequences of one sentence",
            float(is_single.mean()),
            expected=0.0,
            tolerance=_MAX_SINGLE_FRACTION,
            advice="check that the sentences of the dataset are found, or raise config.data.sequence_length",
        )


@dataclasses.dataclass
class SentenceOrderPrediction(SentencePairs):
    """ALBERT's sentence order prediction: classifies whether A and B are in order (Lan et al. 2019, section 3.1).

    A and B are consecutive segments of one document, in order (label 0) or, in half of the pairs, swapped (label 1).
    `the man went to the store` and `he bought a gallon of milk`, swapped, become

        tokens        [CLS] he bought a gallon [MASK] milk [SEP] the man went to [MASK] store [SEP]
        token_types    0    0  0      0 0      0      0    0     1   1   1    1  1      1     1
        pair_labels   1

    A sequence consists of consecutive sentences of one document that fit into a row. A fraction of the sequences is
    shortened, as in NextSentencePrediction (section 4.1). Each sequence is split after a random number of sentences. A
    single sentence is split after a random number of tokens, so that half of the labels are 1 for any corpus. (For a
    single sentence, ALBERT's code takes B from another document and labels the pair as swapped.) A single-token
    sequence gives no example.
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
        """Returns the tokens of both segments in document order."""
        segments = self.segments(example)
        return np.concatenate(segments[::-1] if example["pair_labels"] else segments)

    def statistics(self, examples, vocabulary):
        yield from super().statistics(examples, vocabulary)
        swapped_fraction = float(np.mean([e["pair_labels"] for e in examples]))
        yield Statistic("swapped segments", swapped_fraction, 0.5, binomial_tolerance(len(examples), 0.5))
