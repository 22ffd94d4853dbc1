"""Groups examples of different lengths into batches of few shapes, because each shape is compiled separately.

Lengths are powers of two, or the maximum length of the model. Numbers of rows are powers of two, rounded up to a
multiple of the number of devices that share the rows.
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

SHORTEST = 16  # minimum padded length of a row in tokens
_TOKENS = 8192  # maximum tokens of a batch, with padding; a batch of one row per device may have more


def bucket(length: int, longest: Optional[int] = None, shortest: int = SHORTEST) -> int:
    """Returns the padded length for a length: the next power of two, at least `shortest` and at most `longest`."""
    padded = max(1 << (length - 1).bit_length(), shortest)
    return padded if longest is None else min(padded, longest)


def batches(
    examples: Iterable[Example], mesh: jax.sharding.Mesh, longest: Optional[int] = None, pad: Optional[int] = None
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yields batches of examples of similar length, with the indices of the examples.

    A batch may have extra rows, which repeat its last example. They give the batch one of few shapes, whose rows the
    mesh divides.

    Args:
      examples: model inputs without padding, all with the same names; consumed lazily.
      longest: maximum length of the model; None: no limit.
      pad: the id of padding, which is masked; None: 0.

    Yields:
      The indices in `examples` of the first rows, without extra rows, and the arrays of the batch.
    """
    parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    waiting: dict[Lengths, dict[int, Example]] = collections.defaultdict(dict)

    def collated(lengths: Lengths) -> tuple[list[int], dict[str, np.ndarray]]:
        alike = waiting.pop(lengths)
        count = min(-(-bucket(len(alike), shortest=1) // parts) * parts, _most_rows(lengths, parts))
        rows = [[example] for example in alike.values()]
        return list(alike), collate(rows + rows[-1:] * (count - len(rows)), lengths, pad or 0)

    for number, example in enumerate(examples):
        lengths = _lengths(example, longest)
        waiting[lengths][number] = example
        if len(waiting[lengths]) == _most_rows(lengths, parts):
            yield collated(lengths)
    for lengths in list(waiting):
        yield collated(lengths)


def _most_rows(lengths: Lengths, parts: int) -> int:
    return max(_TOKENS // lengths.inputs // parts, 1) * parts


def _lengths(example: Example, longest: Optional[int]) -> Lengths:
    """Returns the padded lengths of the inputs and targets of an example."""
    if is_encoder_decoder(example):
        inputs, targets = (bucket(len(example.get(side, ())), longest) for side in ("encoder_tokens", "tokens"))
    else:
        inputs = targets = bucket(len(example["tokens"]), longest)
        if is_gathered(example):
            targets = bucket(len(example["masked_positions"]), shortest=1)
    return Lengths(inputs, inputs, targets)
