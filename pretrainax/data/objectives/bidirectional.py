"""Bidirectional language modelling: predicts each token from the preceding tokens, and from the following tokens."""

import dataclasses
from typing import ClassVar

import numpy as np

from pretrainax.data import word_characters  # noqa: F401  registers the field of characters
from pretrainax.data.batch import Field, Lengths, register_fields
from pretrainax.data.objectives.base import Statistic
from pretrainax.data.objectives.causal import CausalLM, positions_from_segments

register_fields(
    Field("previous", "BT", ("recurrent",), "target of the backward model", optional=True, below="vocab_size"),
    Field("previous_weights", "BT", ("recurrent",), "loss weight of `previous`", np.float32, optional=True),
)


@dataclasses.dataclass
class BidirectionalLM(CausalLM):
    """Predicts the next and the previous token at every position (Peters et al. 2018, section 3.1).

    A forward and a backward model share the input and output layers. The training loss, "total_loss", is the sum of
    the forward and the backward loss. Both losses use a softmax over the whole vocabulary. The metric "loss" is the
    forward loss, the negative log-likelihood of the text.

    Windows are cut from concatenated documents, so rows have no padding. The window `the cat . a` (two documents,
    sequence length 4) becomes

        tokens             the  cat  .    a
        targets            cat  .    a    the
        loss_weights       1    1    1    0
        previous           a    the  cat  .
        previous_weights   0    1    1    1
        segment_ids        1    1    1    1
        positions          0    1    2    3

    With `mask_documents`, context stays inside a document:

        loss_weights       1    1    0    0
        previous_weights   0    1    1    0
        segment_ids        1    1    1    2
        positions          0    1    2    0

    A target outside the window, or outside the document, has weight 0.
    """

    families: ClassVar[tuple[str, ...]] = ("recurrent",)
    shortest: ClassVar[int] = 2
    select_by: ClassVar[str] = "total_loss"
    head_metrics: ClassVar[tuple[str, ...]] = ("backward_loss", "backward_accuracy", "total_loss")

    def lengths(self, sequence_length):
        return self.measure(sequence_length)

    def measure(self, raw):
        return Lengths(raw, inputs=raw, targets=raw)

    def example(self, text, rng, vocabulary):
        tokens = text.tokens
        segments = text.segment_ids if self.mask_documents else np.ones_like(tokens)
        same_document = (segments[1:] == segments[:-1]).astype(np.float32)  # 1: the next token is in the same document
        return {
            "tokens": tokens,
            "segment_ids": segments,
            "positions": positions_from_segments(segments),
            "targets": np.roll(tokens, -1),
            "loss_weights": np.append(same_document, np.float32(0)),
            "previous": np.roll(tokens, 1),
            "previous_weights": np.append(np.float32(0), same_document),
        }

    def restore(self, example, vocabulary):
        return np.append(example["tokens"][:1], example["targets"][:-1])

    def statistics(self, examples, vocabulary):
        yield from super().statistics(examples, vocabulary)
        predicted = sum(float(example["previous_weights"].sum()) for example in examples)
        yield Statistic("backward loss tokens", predicted / sum(len(example["tokens"]) for example in examples))
