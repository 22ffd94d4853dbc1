"""Lays examples of unequal length into batches of few shapes, so that a model is compiled for few.

Lengths and numbers of rows are powers of two, but for the longest that the model takes.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
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
    examples: Sequence[Example], mesh: jax.sharding.Mesh, longest: Optional[int] = None, pad: Optional[int] = None
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yields batches with the numbers of the examples in their rows, those of like length together.

    Rows of a batch beyond these, which make its shape one of few and let the mesh divide it, repeat the last one.

    Args:
      examples: not padded, all with the same names.
      longest: positions that the model has; None: any number.
      pad: the id in padding, which nobody sees.
    """
    sizes = [bucket(_length(example), longest) for example in examples]
    order = sorted(range(len(examples)), key=sizes.__getitem__)
    parts = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    for size, numbers in itertools.groupby(order, key=sizes.__getitem__):
        most = max(_TOKENS // size // parts, 1) * parts
        alike = list(numbers)
        for start in range(0, len(alike), most):
            some = alike[start : start + most]
            rows = min(-(-bucket(len(some), shortest=1) // parts) * parts, most)
            laid = [[examples[i]] for i in some + some[-1:] * (rows - len(some))]
            yield some, collate(laid, _lengths(laid, size), pad or 0)


def _length(example: Example) -> int:
    return max(len(x) for name, x in example.items() if name.endswith("tokens"))


def _lengths(rows: Sequence[Sequence[Example]], size: int) -> Lengths:
    example = rows[0][0]
    if not (is_gathered(example) and not is_encoder_decoder(example)):
        return Lengths(size, size, size)
    asked = max(len(row[0]["masked_positions"]) for row in rows)
    return Lengths(size, size, bucket(asked, shortest=1))
