"""Masked language modelling: some tokens from all the others."""

import dataclasses
import functools
import math
from typing import ClassVar

import numpy as np

from pretrainax.data.objectives.base import Lengths, Objective


@functools.lru_cache(maxsize=8)
def _special_and_ordinary(vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Whether each id is special, [V] bool, and the ids that are not, [<= V] int32."""
    special = np.zeros(vocabulary.size, bool)
    special[list(vocabulary.special_ids)] = True
    return special, np.flatnonzero(~special).astype(np.int32)


@dataclasses.dataclass
class MaskedLM(Objective):
    """BERT's cloze task (Devlin et al. 2018, section 3.1), masked anew each epoch (Liu et al. 2019, section 4.1).

    Of the n ordinary tokens of a window exactly round(rate * n) are to be predicted. Each of these is replaced by
    [MASK] with probability `mask_fraction`, by a uniformly drawn ordinary token with probability `random_fraction`, and
    else left as it is. Special tokens are neither predicted nor drawn. `my dog is hairy and it barks` with a rate of
    0.3 may become

        tokens             [CLS] my  dog  is  [MASK]  and  apple  barks  [SEP]
        masked_positions   4      6
        targets            hairy  it
        loss_weights       1      1

    The model computes its head at `masked_positions` only. A row has room for K = ceil(rate * T) of them (BERT's
    max_predictions_per_seq); slots that it does not need have weight 0, position 0 and target 0.
    """

    rate: float = 0.15  # of the ordinary tokens are predicted
    mask_fraction: float = 0.8  # of these are replaced by [MASK]
    random_fraction: float = 0.1  # of these are replaced by a random token

    families: ClassVar[tuple[str, ...]] = ("encoder",)
    special_tokens: ClassVar[tuple[str, ...]] = ("mask", "cls", "sep")
    tokenizers: ClassVar[str] = "WordPiece, or ByteBPE with special_pieces roberta or bert"
    shortest: ClassVar[int] = 3  # [CLS], a token, [SEP]

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

    def lengths(self, sequence_length):
        slots = math.ceil(self.rate * sequence_length - 1e-6)  # 0.07 * 100 is 7.000000000000001
        return Lengths(raw=sequence_length - 2, inputs=sequence_length, targets=slots)

    def measure(self, raw):
        return Lengths(raw, inputs=raw + 2, targets=max(round(self.rate * raw), 1))

    def example(self, text, rng, vocabulary):
        tokens, length = text.tokens, len(text.tokens) + 2
        special, ordinary = _special_and_ordinary(vocabulary)

        row = np.empty(length, np.int32)
        row[0], row[1:-1], row[-1] = vocabulary.cls, tokens, vocabulary.sep
        candidates = np.flatnonzero(~special[tokens]) + 1
        count = max(round(self.rate * len(candidates)), min(1, len(candidates)))
        chosen = candidates[rng.choice(len(candidates), count, replace=False, shuffle=False)] if count else candidates
        chosen.sort()

        targets = row[chosen]

        fate = rng.random(count)
        drawn = ordinary[rng.integers(len(ordinary), size=count)]
        replacement = np.where(fate < self.mask_fraction + self.random_fraction, drawn, targets)
        row[chosen] = np.where(fate < self.mask_fraction, np.int32(vocabulary.mask), replacement)
        return {
            "tokens": row,
            "segment_ids": np.ones(length, np.int32),
            "positions": np.arange(length, dtype=np.int32),
            "token_types": np.zeros(length, np.int32),
            "masked_positions": chosen.astype(np.int32),
            "targets": targets,
            "loss_weights": np.ones(count, np.float32),
        }

    def restore(self, example, vocabulary):
        row = example["tokens"].copy()
        row[example["masked_positions"]] = example["targets"]
        return row[1:-1]
