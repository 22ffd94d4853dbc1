"""Groups examples of different lengths into batches of few distinct shapes, because each shape is compiled separately.

The length of a batch is a power of two, or the maximum length of the model. The number of rows is a power of two,
rounded up to a multiple of the number of devices that shard the rows.
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
_MAX_TOKENS = 8192  # maximum tokens per batch, with padding; a batch with one row per device may exceed it


def bucket(length: int, longest: Optional[int] = None, shortest: int = SHORTEST) -> int:
    """Rounds a length up to a power of two, at least `shortest` and at most `longest` (None: no limit)."""
    padded = max(1 << (length - 1).bit_length(), shortest)
    return padded if longest is None else min(padded, longest)


def batches(
    examples: Iterable[Example], mesh: jax.sharding.Mesh, longest: Optional[int] = None, pad: Optional[int] = None
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yields batches of examples of similar length, with the indices of the examples.

    A batch may have extra rows, which repeat the last example. The extra rows limit the number of distinct shapes, and
    make the number of rows divisible by the number of devices that shard the rows.

    Args:
      examples: model inputs without padding, all with the same array names; consumed lazily.
      longest: maximum length of the model, or None for no limit.
      pad: token id for padding, which is masked; None means 0.

    Yields:
      The indices of the examples in the first rows of the batch, and the arrays of the batch, with extra rows.
    """
    num_shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    pending: dict[Lengths, dict[int, Example]] = collections.defaultdict(dict)

    def collate_group(lengths: Lengths) -> tuple[list[int], dict[str, np.ndarray]]:
        examples_by_index = pending.pop(lengths)
        count = min(
            -(-bucket(len(examples_by_index), shortest=1) // num_shards) * num_shards, _max_rows(lengths, num_shards)
        )
        rows = [[example] for example in examples_by_index.values()]
        return list(examples_by_index), collate(rows + rows[-1:] * (count - len(rows)), lengths, pad or 0)

    for number, example in enumerate(examples):
        lengths = _padded_lengths(example, longest)
        pending[lengths][number] = example
        if len(pending[lengths]) == _max_rows(lengths, num_shards):
            yield collate_group(lengths)
    for lengths in list(pending):
        yield collate_group(lengths)


def _max_rows(lengths: Lengths, num_shards: int) -> int:
    return max(_MAX_TOKENS // lengths.inputs // num_shards, 1) * num_shards


def _padded_lengths(example: Example, longest: Optional[int]) -> Lengths:
    """Returns the padded lengths of the inputs and targets of an example."""
    if is_encoder_decoder(example):
        inputs, targets = (bucket(len(example.get(field, ())), longest) for field in ("encoder_tokens", "tokens"))
    else:
        inputs = targets = bucket(len(example["tokens"]), longest)
        if is_gathered(example):
            targets = bucket(len(example["masked_positions"]), shortest=1)
    return Lengths(inputs, inputs, targets)
