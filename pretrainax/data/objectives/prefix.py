"""Defines objectives for decoders that attend to a prefix in both directions.

These are prefix language models, and encoder-decoder objectives that are adapted to a decoder.
"""

import bisect
import dataclasses
import math
from typing import ClassVar

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.batch import Example, Lengths
from pretrainax.data.objectives.base import Objective, Statistic, with_field_path
from pretrainax.data.objectives.causal import CausalLM
from pretrainax.data.objectives.denoisers import SequentialDenoising
from pretrainax.data.objectives.spans import SpanCorruption, encoder_decoder_example


@dataclasses.dataclass
class PrefixLM(CausalLM):
    """Predicts the rest of a sequence from its prefix, with bidirectional attention over the prefix (Liu et al. 2018,
    arXiv 1801.10198, section 4.2.3; Raffel et al. 2020, sections 3.2.1 and 3.2.3, figures 3 and 4).

        python -m pretrainax.main --config=configs/gpt2.py --config.objective="PrefixLM()"

    The prefix is the first 1 to n - 1 of n tokens, each number equally likely. With a prefix of 4, `Thank you for
    inviting me to your party last week` becomes

        tokens        Thank you for  inviting me to   your  party last
        targets       you   for inviting  me  to your party last  week
        prefix_mask   1     1   1    1        0  0    0     0     0
        loss_weights  0     0   0    1        1  1    1     1     1

    With `mask_documents`, each document of a window has a separate prefix. For an encoder-decoder, this objective is
    SequentialDenoising(0.5).
    """

    is_likelihood: ClassVar[bool] = False  # the loss covers only the text after the prefix

    def example(self, text, rng, vocabulary):
        example = super().example(text, rng, vocabulary)
        documents = example["segment_ids"] - 1
        prefixes = rng.integers(1, np.maximum(_predictable(example), 1) + 1)
        places = example["positions"] - prefixes[documents]
        example["prefix_mask"] = (places < 0).astype(np.int32)
        example["loss_weights"] = example["loss_weights"] * (places >= -1)
        return example

    def prompt(self, tokens, vocabulary):
        return {**super().prompt(tokens, vocabulary), "prefix_mask": np.ones(len(tokens), np.int32)}

    def statistics(self, examples, vocabulary):
        yield from super().statistics(examples, vocabulary)
        most = np.concatenate([_predictable(example) for example in examples])
        most = most[most > 0]
        predicted = sum(float(example["loss_weights"].sum()) for example in examples)
        yield Statistic(
            "text behind the prefix",
            predicted / float(most.sum()),
            expected=float((most + 1).sum() / 2 / most.sum()),
            tolerance=5 * math.sqrt(((most**2 - 1) / 12).sum()) / float(most.sum()) + 1e-6,  # of uniform distributions
        )


def _predictable(example: Example) -> np.ndarray:
    """Returns the number of tokens of each document that a causal LM would predict, [documents]."""
    segment_ids = example["segment_ids"]
    ends = np.flatnonzero(np.diff(segment_ids, append=0))
    # The last token of a document does not predict the next document; in the last document, every token has a target.
    return np.bincount(segment_ids)[1:] - (example["loss_weights"][ends] == 0)


@dataclasses.dataclass
class DecoderOnly(Objective):
    """Adapts an objective of encoder-decoders to a decoder: it reads inputs and targets as one sequence, with
    bidirectional attention over the inputs (Raffel et al. 2020, section 3.2.1; UL2R, Tay et al. 2022b, arXiv
    2210.11399, section 2).

        python -m pretrainax.main --config=configs/gpt2.py --config.objective="DecoderOnly(objective=UL2R())" \\
            --config.tokenizer.num_sentinels=200 --config.model.vocab_size=50560

    With span corruption, `Thank you for inviting me to your party last week` becomes

        tokens        Thank you <X> me to your party <Y> week </s> <X> for inviting <Y>  last <Z>
        targets       you   <X> me  to your party <Y> week </s> <X> for inviting <Y> last <Z> </s>
        prefix_mask   1     1   1   1  1    1     1   1    1    1   0   0   0        0    0    0
        loss_weights  0     0   0   0  0    0     0   0    0    1   1   1   1        1    1    1

    The last input predicts the first target, so there is no start token. Inputs and targets share
    config.data.sequence_length. For pairs, the target has at most half of it, and the source has the rest.
    """

    objective: Objective = dataclasses.field(default_factory=SpanCorruption)  # an objective for encoder-decoders

    families: ClassVar[tuple[str, ...]] = ("decoder",)

    @property
    def unit(self) -> str:
        return self.objective.unit

    @property
    def packs(self) -> bool:
        return self.objective.packs

    @property
    def part(self) -> str:
        return self.objective.part

    @property
    def static(self) -> bool:
        return self.objective.static

    @property
    def shortest(self) -> int:
        return max(3 if part.unit == "pairs" else _joined_length(part, 2) for part in self._parts)

    @property
    def _parts(self) -> list[Objective]:
        return [part for _, part in self.objective.components()]

    def components(self, pairs=False):
        parts = self.objective.components(pairs)
        return [(weight, dataclasses.replace(self, objective=part)) for weight, part in parts]

    def bind(self, tokenizer):
        return dataclasses.replace(self, objective=self.objective.bind(tokenizer))

    def lengths(self, sequence_length):
        raw = max(_max_raw(part, sequence_length) for part in self._parts)
        return Lengths(raw, sequence_length, sequence_length)

    def measure(self, raw):
        length = max(_joined_length(part, raw) for part in self._parts)
        return Lengths(raw, length, length)

    def max_pair_lengths(self, lengths):
        targets = min(self.objective.lengths(lengths.inputs).targets, (lengths.inputs + 1) // 2)
        return lengths.inputs + 1 - targets, targets

    def measure_pairs(self, sizes):
        length = self.objective.measure_pairs(sizes).sum(axis=1) - 1
        return np.stack([length, length], axis=1)

    def example(self, text, rng, vocabulary):
        return to_decoder_example(self.objective.example(text, rng, _with_start(vocabulary)))

    def prompt(self, tokens, vocabulary):
        both = self.objective.prompt(tokens, _with_start(vocabulary))
        return PrefixLM().prompt(both["encoder_tokens"], vocabulary)

    def restore(self, example, vocabulary):
        return self.objective.restore(_separated(example, vocabulary), _with_start(vocabulary))

    def statistics(self, examples, vocabulary):
        share = np.mean([example["loss_weights"].mean() for example in examples])
        yield Statistic("loss tokens", float(share))
        yield from self.objective.statistics([_separated(e, vocabulary) for e in examples], _with_start(vocabulary))

    def check_vocabulary(self, vocabulary, sequence_length):
        for part in self._parts:
            if part.unit == "pairs":
                part.check_vocabulary(_with_start(vocabulary), sequence_length)
                continue
            inputs = part.measure(_max_raw(part, sequence_length)).inputs  # encoder inputs of a full row
            try:
                part.check_vocabulary(_with_start(vocabulary), inputs)
            except UserError as e:
                length = "config.data.sequence_length {}"
                raise UserError(str(e).replace(length.format(inputs), length.format(sequence_length))) from e

    def field_problems(self):
        if "encoder_decoder" not in self.objective.families:
            kind = type(self.objective).__name__
            yield f"config.objective.objective is {kind}, it must support encoder_decoder, for example SpanCorruption"
            return
        yield from with_field_path("objective", self.objective.field_problems())

    def problems(self, experiment):
        wrong = list(super().problems(experiment))
        yield from wrong
        if not wrong:
            model = dataclasses.replace(experiment.model, family="encoder_decoder")
            yield from with_field_path(
                "objective", self.objective.problems(dataclasses.replace(experiment, model=model))
            )


def to_decoder_example(both: Example) -> Example:
    """Returns the decoder example of an encoder-decoder example: first its inputs, then its targets.

    Attention over the inputs is bidirectional. Only the targets have loss weights.
    """
    inputs, targets = both["encoder_tokens"], both["targets"]
    tokens = np.concatenate([inputs, targets])
    places = np.arange(len(tokens) - 1, dtype=np.int32)
    return {
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "segment_ids": np.ones(len(places), np.int32),
        "positions": places,
        "prefix_mask": (places < len(inputs)).astype(np.int32),
        "loss_weights": np.concatenate([np.zeros(len(inputs) - 1, np.float32), both["loss_weights"]]),
    }


def _joined_length(objective: Objective, raw: int) -> int:
    """Returns the maximum number of inputs and targets for `raw` tokens, except the last target, which is no input."""
    _, inputs, targets = objective.measure(raw)
    if isinstance(objective, SequentialDenoising):  # its longest inputs and targets are in different examples
        return raw + objective.mode_tokens + 1
    return inputs + targets - 1


def _max_raw(objective: Objective, length: int) -> int:
    """Returns the maximum number of raw tokens whose inputs and targets have at most `length` tokens in total."""
    if objective.unit == "pairs":
        return length + 1
    return bisect.bisect_right(range(1, length + 2), length, key=lambda raw: _joined_length(objective, raw))


def _with_start(vocabulary):
    """Returns a vocabulary that has <pad>, the start token of encoder-decoder objectives.

    If the vocabulary has no <pad>, its eos is used. A decoder does not read this token.
    """
    return vocabulary if vocabulary.pad is not None else dataclasses.replace(vocabulary, pad=vocabulary.eos)


def _separated(example: Example, vocabulary) -> Example:
    """Returns the encoder-decoder example of a DecoderOnly example; inverts `to_decoder_example`."""
    inputs = int(example["prefix_mask"].sum())
    targets, weights = example["targets"][inputs - 1 :], example["loss_weights"][inputs - 1 :]
    both = encoder_decoder_example(example["tokens"][:inputs], targets, _with_start(vocabulary).pad)
    return {**both, "loss_weights": weights}
