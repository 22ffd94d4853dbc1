"""Collates examples into the rows of a batch: concatenates the examples of a row and adds segment ids and padding."""

from collections.abc import Sequence
from typing import Optional

import numpy as np

from pretrainax.data.batch import LENGTH_FIELDS, SEGMENT_FIELDS, TOKEN_FIELDS, Example, Lengths, row_length


def collate(
    rows: Sequence[Sequence[Example]], lengths: Lengths, pad: int, template: Optional[Example] = None
) -> dict[str, np.ndarray]:
    """Collates rows of examples into a batch [b, ...], padded to `lengths`; a row without examples is all padding.

    Segment ids continue across the examples of a row, and `masked_positions` count from the start of the row. Padding
    is `pad` in token arrays and 0 in all other arrays: no token attends to segment 0, and weight 0 adds no loss.

    Args:
      rows: the examples of each row.
      lengths: the lengths to which the arrays are padded.
      pad: the token id of padding.
      template: an example that has every array of the batch. If None, the first example of the first row is used. If
        the template has text lengths, each row must be a single segment.

    Raises:
      ValueError: the template has text lengths, but a row has several segments.
    """
    batch: dict[str, np.ndarray] = {}
    template = template or rows[0][0]
    for name, array in template.items():
        if name in LENGTH_FIELDS:
            continue
        if array.ndim == 0:  # one number per row: the label of its only example, or a sum of counts
            batch[name] = np.array([sum(_scalar(example, name) for example in row) for row in rows], array.dtype)
            continue
        padding, length = pad if name in TOKEN_FIELDS else 0, row_length(name, template, lengths)
        if all(len(row) == 1 and name in row[0] and len(row[0][name]) == length for row in rows):
            stacked = np.concatenate([row[0][name] for row in rows], dtype=array.dtype)
            batch[name] = stacked.reshape(-1, length, *array.shape[1:])  # faster than row by row
            continue
        batch[name] = padded = np.empty((len(rows), length, *array.shape[1:]), array.dtype)
        for out, row in zip(padded, rows, strict=True):
            end = _write_arrays(out, name, row)
            out[end:] = padding
    return batch | {name: _row_lengths(batch[ids]) for name, ids in LENGTH_FIELDS.items() if name in template}


def _scalar(example: Example, name: str) -> np.ndarray:
    """Returns the scalar `name` of an example.

    In a mixture of objectives, an example may lack the scalar "denominator" (see `FIELDS` in data.batch). In this
    case, returns the sum of its loss weights.
    """
    return example["loss_weights"].sum() if name == "denominator" and name not in example else example[name]


def _row_lengths(segment_ids: np.ndarray) -> np.ndarray:
    """Returns the number of tokens in each row, not counting padding, [b].

    Raises:
      ValueError: a row has several segments.
    """
    if segment_ids.max(initial=0) > 1:
        raise ValueError("a row has several segments, but its objective sets one_text")
    return (segment_ids > 0).sum(1, dtype=np.int32)


def _write_arrays(out: np.ndarray, name: str, row: Sequence[Example]) -> int:
    """Writes the array `name` of each example in a row consecutively into `out`; returns how many elements it wrote."""
    end, offset = 0, 0
    for example in row:
        array = example.get(name)
        if array is None:  # the example comes from another objective of a mixture
            array = np.zeros((len(example["tokens"]), *out.shape[1:]), out.dtype)
        start, end = end, end + len(array)
        out[start:end] = array  # raises ValueError if the examples are longer than the row
        if len(row) == 1:
            break
        if name in SEGMENT_FIELDS:
            out[start:end] += offset
            offset = out[end - 1]
        elif name == "masked_positions":
            out[start:end] += offset
            offset += len(example["tokens"])
    return end
