"""Causal language modelling: predicts each token from the preceding tokens."""

import dataclasses
import functools
from typing import ClassVar

import numpy as np

from pretrainax.data.batch import Example, Lengths
from pretrainax.data.objectives.base import Objective, Statistic


def positions_from_segments(segment_ids: np.ndarray) -> np.ndarray:
    """Computes positions that restart at 0 in each document: [1, 1, 1, 2, 2] -> [0, 1, 2, 0, 1]."""
    index = np.arange(len(segment_ids), dtype=np.int32)
    begins = np.zeros_like(index)
    begins[1:] = np.where(segment_ids[1:] != segment_ids[:-1], index[1:], 0)
    return index - np.maximum.accumulate(begins)


@functools.lru_cache(maxsize=64)  # most sequences have the same length
def _constant_arrays(length: int) -> Example:
    """Builds the arrays of an example that do not depend on its tokens, for `length` inputs that are all predicted.

    The cached arrays are shared between examples, so they are read-only.
    """
    arrays = {
        "segment_ids": np.ones(length, np.int32),
        "positions": np.arange(length, dtype=np.int32),
        "loss_weights": np.ones(length, np.float32),
    }
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


@dataclasses.dataclass
class CausalLM(Objective):
    """Predicts the next token at every position (Radford et al. 2018, section 3.1; 2019, section 2).

    Windows are cut from concatenated documents, so rows have no padding. The window `the cat . a dog` (5 tokens of two
    documents, sequence length 4) becomes

        tokens         the  cat  .    a
        targets        cat  .    a    dog
        loss_weights   1    1    1    1
        segment_ids    1    1    1    1
        positions      0    1    2    3

    With `mask_documents`, attention and predictions stay inside a document:

        loss_weights   1    1    0    1
        segment_ids    1    1    1    2
        positions      0    1    2    0

    With config.data.packing, each sequence comes from one document, and a row may contain several sequences. Sequences
    do not attend to each other, even without `mask_documents`. A single-token sequence has no target.
    """

    mask_documents: bool = False  # whether attention, positions and predictions stay inside one document

    @property
    def single_segment(self) -> bool:
        return not self.mask_documents

    families: ClassVar[tuple[str, ...]] = ("decoder",)
    is_likelihood: ClassVar[bool] = True

    def lengths(self, sequence_length):
        return self.measure(sequence_length + 1)

    def measure(self, raw):
        return Lengths(raw, inputs=raw - 1, targets=raw - 1)

    def example(self, text, rng, vocabulary):
        tokens, segment_ids = text.tokens, text.segment_ids
        length = len(tokens) - 1
        example = {"tokens": tokens[:-1], "targets": tokens[1:]}
        if self.mask_documents:
            example["segment_ids"] = segment_ids[:-1]
            example["positions"] = positions_from_segments(segment_ids[:-1])
            example["loss_weights"] = (segment_ids[1:] == segment_ids[:-1]).astype(np.float32)
        else:
            example |= _constant_arrays(length)
        return example

    def prompt(self, tokens, vocabulary):
        return {
            "tokens": tokens,
            "segment_ids": np.ones(len(tokens), np.int32),
            "positions": np.arange(len(tokens), dtype=np.int32),
        }

    def restore(self, example, vocabulary):
        return np.concatenate([example["tokens"][:1], example["targets"]])

    def token_offsets(self, example, vocabulary):
        return 1 + np.arange(len(example["targets"]))

    def statistics(self, examples, vocabulary):
        predicted = sum(float(example["loss_weights"].sum()) for example in examples)
        yield Statistic("loss tokens", predicted / sum(len(example["tokens"]) for example in examples))
        if vocabulary.separator is not None:
            ends = sum(int((self.restore(e, vocabulary) == vocabulary.separator).sum()) for e in examples)
            yield Statistic("ends of documents in an example", ends / len(examples))
