"""Examples laid into the rows of a batch: one after the other, told apart by segment ids, then padding."""

from collections.abc import Sequence
from typing import Optional

import numpy as np

from pretrainax.data.batch import LENGTH_FIELDS, SEGMENT_FIELDS, TOKEN_FIELDS, Example, Lengths, row_length


def collate(
    rows: Sequence[Sequence[Example]], lengths: Lengths, pad: int, template: Optional[Example] = None
) -> dict[str, np.ndarray]:
    """Makes a batch [b, ...] of rows, each of some examples, padded to `lengths`; one of none is all padding.

    `template` has an array of each name that the batch is to have; None: the first example.
    Segments of an example are numbered after those of the one before it; its `masked_positions` count from the row's
    start. Padding is `pad` in the tokens and 0 everywhere else: segment 0 is seen by nobody, weight 0 is no loss.
    A template with lengths of texts says that each row has one; ValueError where that is not so.
    """
    batch: dict[str, np.ndarray] = {}
    template = template or rows[0][0]
    for name, array in template.items():
        if name in LENGTH_FIELDS:
            continue
        if array.ndim == 0:  # of a whole row: a label, where it is one example, or a count
            batch[name] = np.array([sum(_number(example, name) for example in row) for row in rows], array.dtype)
            continue
        padding, length = pad if name in TOKEN_FIELDS else 0, row_length(name, template, lengths)
        if all(len(row) == 1 and name in row[0] and len(row[0][name]) == length for row in rows):
            whole = np.concatenate([row[0][name] for row in rows], dtype=array.dtype)
            batch[name] = whole.reshape(-1, length, *array.shape[1:])  # faster than row by row
            continue
        batch[name] = filled = np.empty((len(rows), length, *array.shape[1:]), array.dtype)
        for out, row in zip(filled, rows, strict=True):
            end = _lay(out, name, row)
            out[end:] = padding
    return batch | {name: _lengths(batch[ids]) for name, ids in LENGTH_FIELDS.items() if name in template}


def _number(example: Example, name: str) -> np.ndarray:
    """Returns a number of an example; of one of another objective, which says no denominator, its loss weights."""
    return example["loss_weights"].sum() if name == "denominator" and name not in example else example[name]


def _lengths(segment_ids: np.ndarray) -> np.ndarray:
    """Returns the lengths [b] of the texts of rows that have one each."""
    if segment_ids.max(initial=0) > 1:
        raise ValueError("a row has several segments: its objective's one_text says that it has one")
    return (segment_ids > 0).sum(1, dtype=np.int32)


def _lay(out: np.ndarray, name: str, row: Sequence[Example]) -> int:
    """Writes the arrays of one name one after the other; returns where they end."""
    end, shift = 0, 0
    for example in row:
        piece = example.get(name)
        if piece is None:  # of another objective of a mixture
            piece = np.zeros((len(example["tokens"]), *out.shape[1:]), out.dtype)
        start, end = end, end + len(piece)
        out[start:end] = piece  # raises where examples are longer than they said
        if len(row) == 1:
            break
        if name in SEGMENT_FIELDS:
            out[start:end] += shift
            shift = out[end - 1]
        elif name == "masked_positions":
            out[start:end] += shift
            shift += len(example["tokens"])
    return end
