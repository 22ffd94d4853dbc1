"""Counts the query-key pairs that an attention backend multiplies.

A causal mask hides half of the pairs, and a window hides more. Only a kernel that skips hidden pairs does less work.
Such a kernel works in tiles and skips the tiles in which every pair is hidden.
"""

import numpy as np

from pretrainax.layers.attention_mask import Mask
from pretrainax.layers.attention_spec import AttentionSpec


def all_pairs(spec: AttentionSpec) -> np.ndarray:
    """Returns the number of pairs that a kernel without skipping multiplies, per part of the length: [sequence].

    The numbers are for one row and one head. For block-sparse attention, they are the pairs of its blocks.
    """
    pairs = spec.query_length * spec.key_length if spec.blocks is None else spec.blocks.pairs(spec.query_length)
    return np.full(spec.sequence, pairs / spec.sequence)


def seen_pairs(spec: AttentionSpec, tile: tuple[int, int] = (1, 1)) -> np.ndarray:
    """Returns the number of pairs that a kernel with skipping multiplies, per part of the length, [sequence].

    The kernel skips each tile of (queries, keys) in which a causal mask or a window hides every pair. It does not skip
    pairs that segments hide, because segments differ between rows.

    Args:
      tile: numbers of queries and keys per tile; (1, 1) counts exactly the pairs that the causal mask and the window
        allow.
    """
    before, after = spec.query_length, 0 if spec.causal else spec.key_length
    if spec.window is not None:
        before, after = Mask(spec.causal, window=spec.window).reach
    first = np.arange(0, spec.query_length, tile[0])  # index of the first query of each row of tiles
    end = np.minimum(first + tile[0], spec.query_length)
    low = np.maximum(first - before, 0) // tile[1] * tile[1]  # first key that each row of tiles multiplies
    high = np.minimum(-(-(end + after) // tile[1]) * tile[1], spec.key_length)
    parts = np.array_split((end - first) * (high - low), spec.sequence)
    return np.array([part.sum() for part in parts], float)
