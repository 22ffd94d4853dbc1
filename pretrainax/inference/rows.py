"""Lays examples of unequal length into batches of few shapes, so that a model is compiled for few.

Lengths and numbers of rows are powers of two, but for the longest that the model takes.
"""

import collections
import math
from collections.abc import Iterable, Iterator
from typing import Optional

import jax
import numpy as np

from pretrainax.data.batch import Example, Lengths, is_encoder_decoder, is_gathered
from pretrainax.data.collate import collate
from pretrainax.sharding.axes import BATCH_AXES

SHORTEST = 16  # tokens of a row, at least
_TOKENS = 8192  # of a batch at most, padding included, where one row has fewer


def bucket(length: int, longest: Optional[int] = None, shortest: int = SHORTEST) -> int:
    """Returns the power of two that `length` is padded to, no more than `longest`."""
    padded = max(1 << (length - 1).bit_length(), shortest)
    return padded if longest is None else min(padded, longest)


def batches(
    examples: Iterable[Example], mesh: jax.sharding.Mesh, longest: Optional[int] = None, pad: Optional[int] = None
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yields batches with the numbers of the examples in their rows, those of like length together.

    Rows of a batch beyond these, which make its shape one of few and let the mesh divide it, repeat the last one.

    Args:
      examples: not padded, all with the same names. They are taken as they are needed.
      longest: positions that the model has; None: any number.
      pad: the id in padding, which nobody sees.
    """
    parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    waiting: dict[Lengths, dict[int, Example]] = collections.defaultdict(dict)

    def laid(lengths: Lengths) -> tuple[list[int], dict[str, np.ndarray]]:
        alike = waiting.pop(lengths)
        count = min(-(-bucket(len(alike), shortest=1) // parts) * parts, _most_rows(lengths, parts))
        rows = [[example] for example in alike.values()]
        return list(alike), collate(rows + rows[-1:] * (count - len(rows)), lengths, pad or 0)

    for number, example in enumerate(examples):
        lengths = _lengths(example, longest)
        waiting[lengths][number] = example
        if len(waiting[lengths]) == _most_rows(lengths, parts):
            yield laid(lengths)
    for lengths in list(waiting):
        yield laid(lengths)


def _most_rows(lengths: Lengths, parts: int) -> int:
    return max(_TOKENS // lengths.inputs // parts, 1) * parts


def _lengths(example: Example, longest: Optional[int]) -> Lengths:
    """Returns the lengths that an example is padded to."""
    if is_encoder_decoder(example):
        inputs, targets = (bucket(len(example.get(side, ())), longest) for side in ("encoder_tokens", "tokens"))
    else:
        inputs = targets = bucket(len(example["tokens"]), longest)
        if is_gathered(example):
            targets = bucket(len(example["masked_positions"]), shortest=1)
    return Lengths(inputs, inputs, targets)
