"""Examples laid into one row of a batch: one after the other, told apart by segment ids, then padding."""

from collections.abc import Sequence

import numpy as np

from pretrainax.data.objectives import Lengths

_PREDICTED = ("targets", "loss_weights", "masked_positions")
_SEGMENTS = ("segment_ids", "encoder_segment_ids")


def fill_row(examples: Sequence[dict[str, np.ndarray]], lengths: Lengths, pad: int) -> dict[str, np.ndarray]:
    """One row of the lengths of a batch: encoder's arrays and, without an encoder, the text's are [inputs].

    Segments of the n-th example are numbered after those of the one before; its `masked_positions` count from the
    row's start. Padding is `pad` in the tokens and 0 everywhere else: segment 0 is seen by nobody, weight 0 is no loss.
    """
    first = examples[0]
    row = {}
    for name, array in first.items():
        if array.ndim == 0:  # of a whole row
            row[name] = array
            continue
        length = _length(name, first, lengths)
        if len(examples) == 1 and len(array) == length:
            row[name] = array
            continue
        filled = np.full(length, pad if name.endswith("tokens") else 0, array.dtype)
        shift, start, tokens = 0, 0, 0
        for example in examples:
            piece = example[name]
            place = filled[start : start + len(piece)]
            place[:] = piece  # raises where an example is longer than was announced
            if name in _SEGMENTS:
                place += shift
                shift = place[-1]
            elif name == "masked_positions":
                place += tokens
                tokens += len(example["tokens"])
            start += len(piece)
        row[name] = filled
    return row


def _length(name: str, example: dict[str, np.ndarray], lengths: Lengths) -> int:
    if name in _PREDICTED:
        return lengths.targets
    has_encoder = "encoder_tokens" in example
    return lengths.targets if has_encoder and not name.startswith("encoder_") else lengths.inputs
