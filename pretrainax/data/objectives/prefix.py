"""Defines objectives for decoders with bidirectional attention over a prefix.

These are the prefix language model, and an adapter that trains a decoder with an encoder-decoder objective.
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
    """Predicts the tokens after a prefix of a sequence, with bidirectional attention over the prefix.

    Sources: Liu et al. 2018, arXiv 1801.10198, section 4.2.3; Raffel et al. 2020, sections 3.2.1 and 3.2.3, figures 3
    and 4.

        python -m pretrainax.main --config=configs/gpt2.py --config.objective="PrefixLM()"

    The prefix length is drawn uniformly from 1 to n - 1 for a sequence of n tokens. With a prefix of 4 tokens, `Thank
    you for inviting me to your party last week` becomes

        tokens        Thank you for  inviting me to   your  party last
        targets       you   for inviting  me  to your party last  week
        prefix_mask   1     1   1    1        0  0    0     0     0
        loss_weights  0     0   0    1        1  1    1     1     1

    With `mask_documents`, each document of a window has a separate prefix. For an encoder-decoder, the equivalent
    objective is SequentialDenoising(0.5).
    """

    is_likelihood: ClassVar[bool] = False  # the loss covers only the tokens after the prefix

    def example(self, text, rng, vocabulary):
        example = super().example(text, rng, vocabulary)
        document_indices = example["segment_ids"] - 1
        prefix_lengths = rng.integers(1, np.maximum(_count_targets(example), 1) + 1)
        offsets = example["positions"] - prefix_lengths[document_indices]
        example["prefix_mask"] = (offsets < 0).astype(np.int32)
        example["loss_weights"] = example["loss_weights"] * (offsets >= -1)
        return example

    def prompt(self, tokens, vocabulary):
        return {**super().prompt(tokens, vocabulary), "prefix_mask": np.ones(len(tokens), np.int32)}

    def statistics(self, examples, vocabulary):
        yield from super().statistics(examples, vocabulary)
        num_targets = np.concatenate([_count_targets(example) for example in examples])
        num_targets = num_targets[num_targets > 0]
        predicted = sum(float(example["loss_weights"].sum()) for example in examples)
        yield Statistic(
            "text behind the prefix",
            predicted / float(num_targets.sum()),
            expected=float((num_targets + 1).sum() / 2 / num_targets.sum()),
            # The variance of a uniform draw from 1 to n is (n^2 - 1) / 12.
            tolerance=5 * math.sqrt(((num_targets**2 - 1) / 12).sum()) / float(num_targets.sum()) + 1e-6,
        )


def _count_targets(example: Example) -> np.ndarray:
    """Counts how many tokens of each document in an example a causal language model would predict, [documents]."""
    segment_ids = example["segment_ids"]
    ends = np.flatnonzero(np.diff(segment_ids, append=0))
    # With `mask_documents`, a document's last token has no target, except in the last document of the window.
    return np.bincount(segment_ids)[1:] - (example["loss_weights"][ends] == 0)


@dataclasses.dataclass
class DecoderOnly(Objective):
    """Trains a decoder with an encoder-decoder objective, by joining inputs and targets into one sequence.

    Attention over the inputs is bidirectional. Sources: Raffel et al. 2020, section 3.2.1; UL2R, Tay et al. 2022b,
    arXiv 2210.11399, section 2.

        python -m pretrainax.main --config=configs/gpt2.py --config.objective="DecoderOnly(objective=UL2R())" \\
            --config.tokenizer.num_sentinels=200 --config.model.vocab_size=50560

    With span corruption, `Thank you for inviting me to your party last week` becomes

        tokens        Thank you <X> me to your party <Y> week </s> <X> for inviting <Y>  last <Z>
        targets       you   <X> me  to your party <Y> week </s> <X> for inviting <Y> last <Z> </s>
        prefix_mask   1     1   1   1  1    1     1   1    1    1   0   0   0        0    0    0
        loss_weights  0     0   0   0  0    0     0   0    0    1   1   1   1        1    1    1

    The model predicts the first target at the last input, so no start token is needed. Inputs and targets together have
    at most config.data.sequence_length tokens. For pairs, the target is truncated to half of this length, and the
    source to the remaining length.
    """

    objective: Objective = dataclasses.field(default_factory=SpanCorruption)  # the encoder-decoder objective

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
        return max(3 if component.unit == "pairs" else _combined_length(component, 2) for component in self._components)

    @property
    def _components(self) -> list[Objective]:
        return [component for _, component in self.objective.components()]

    def components(self, pairs=False):
        components = self.objective.components(pairs)
        return [(weight, dataclasses.replace(self, objective=component)) for weight, component in components]

    def bind(self, tokenizer):
        return dataclasses.replace(self, objective=self.objective.bind(tokenizer))

    def lengths(self, sequence_length):
        raw = max(_max_raw(component, sequence_length) for component in self._components)
        return Lengths(raw, sequence_length, sequence_length)

    def measure(self, raw):
        length = max(_combined_length(component, raw) for component in self._components)
        return Lengths(raw, length, length)

    def max_pair_lengths(self, lengths):
        targets = min(self.objective.lengths(lengths.inputs).targets, (lengths.inputs + 1) // 2)
        return lengths.inputs + 1 - targets, targets

    def measure_pairs(self, sizes):
        length = self.objective.measure_pairs(sizes).sum(axis=1) - 1
        return np.stack([length, length], axis=1)

    def example(self, text, rng, vocabulary):
        return to_decoder_example(self.objective.example(text, rng, _with_start_token(vocabulary)))

    def prompt(self, tokens, vocabulary):
        example = self.objective.prompt(tokens, _with_start_token(vocabulary))
        return PrefixLM().prompt(example["encoder_tokens"], vocabulary)

    def restore(self, example, vocabulary):
        return self.objective.restore(_to_encoder_decoder_example(example, vocabulary), _with_start_token(vocabulary))

    def token_offsets(self, example, vocabulary):
        both = _to_encoder_decoder_example(example, vocabulary)
        targets = self.objective.token_offsets(both, _with_start_token(vocabulary))
        return np.concatenate([np.arange(len(example["tokens"]) - len(targets)), targets])

    def statistics(self, examples, vocabulary):
        fraction = np.mean([example["loss_weights"].mean() for example in examples])
        yield Statistic("loss tokens", float(fraction))
        yield from self.objective.statistics(
            [_to_encoder_decoder_example(e, vocabulary) for e in examples], _with_start_token(vocabulary)
        )

    def check_vocabulary(self, vocabulary, sequence_length):
        for component in self._components:
            if component.unit == "pairs":
                component.check_vocabulary(_with_start_token(vocabulary), sequence_length)
                continue
            inputs = component.measure(_max_raw(component, sequence_length)).inputs  # encoder inputs of a full row
            try:
                component.check_vocabulary(_with_start_token(vocabulary), inputs)
            except UserError as e:
                field = "config.data.sequence_length {}"
                raise UserError(str(e).replace(field.format(inputs), field.format(sequence_length))) from e

    def field_problems(self):
        if "encoder_decoder" not in self.objective.families:
            kind = type(self.objective).__name__
            yield f"config.objective.objective is {kind}, it must support encoder_decoder, for example SpanCorruption"
            return
        yield from with_field_path("objective", self.objective.field_problems())

    def problems(self, experiment):
        errors = list(super().problems(experiment))
        yield from errors
        if not errors:
            model = dataclasses.replace(experiment.model, family="encoder_decoder")
            yield from with_field_path(
                "objective", self.objective.problems(dataclasses.replace(experiment, model=model))
            )


def to_decoder_example(both: Example) -> Example:
    """Converts an encoder-decoder example to a decoder example, in which the inputs are followed by the targets.

    Attention over the inputs is bidirectional. Only the targets have loss weights.
    """
    inputs, targets = both["encoder_tokens"], both["targets"]
    tokens = np.concatenate([inputs, targets])
    positions = np.arange(len(tokens) - 1, dtype=np.int32)
    return {
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "segment_ids": np.ones(len(positions), np.int32),
        "positions": positions,
        "prefix_mask": (positions < len(inputs)).astype(np.int32),
        "loss_weights": np.concatenate([np.zeros(len(inputs) - 1, np.float32), both["loss_weights"]]),
    }


def _combined_length(objective: Objective, raw: int) -> int:
    """Returns the maximum total length of inputs and targets for `raw` tokens.

    The last target does not count, because it is never an input.
    """
    _, inputs, targets = objective.measure(raw)
    if isinstance(objective, SequentialDenoising):  # no example has both the longest inputs and the longest targets
        return raw + objective.mode_tokens + 1
    return inputs + targets - 1


def _max_raw(objective: Objective, length: int) -> int:
    """Returns the maximum number of raw tokens whose combined inputs and targets fit into `length` tokens."""
    if objective.unit == "pairs":
        return length + 1
    return bisect.bisect_right(range(1, length + 2), length, key=lambda raw: _combined_length(objective, raw))


def _with_start_token(vocabulary):
    """Returns the vocabulary with a <pad> token, the start token of encoder-decoder objectives.

    If the vocabulary has no <pad>, EOS takes its place. The start token does not appear in the decoder example.
    """
    return vocabulary if vocabulary.pad is not None else dataclasses.replace(vocabulary, pad=vocabulary.eos)


def _to_encoder_decoder_example(example: Example, vocabulary) -> Example:
    """Inverts `to_decoder_example`: converts a decoder example back to the encoder-decoder example."""
    inputs = int(example["prefix_mask"].sum())
    targets, weights = example["targets"][inputs - 1 :], example["loss_weights"][inputs - 1 :]
    encoder_decoder = encoder_decoder_example(example["tokens"][:inputs], targets, _with_start_token(vocabulary).pad)
    return {**encoder_decoder, "loss_weights": weights}
