"""Counts the pairs of a query and a key that an implementation of attention multiplies: its work.

A causal mask hides half of the pairs and a window more, but only a kernel that skips what is hidden has less to do. A
kernel works in tiles, and skips those of which nothing is seen.
"""

import numpy as np

from pretrainax.layers.attention_mask import Mask
from pretrainax.layers.attention_spec import AttentionSpec


def all_pairs(spec: AttentionSpec) -> np.ndarray:
    """Returns the pairs of a kernel that skips nothing; of attention by blocks, those of the blocks."""
    pairs = spec.query_length * spec.key_length if spec.blocks is None else spec.blocks.pairs(spec.query_length)
    return np.full(spec.sequence, pairs / spec.sequence)


def seen_pairs(spec: AttentionSpec, tile: tuple[int, int] = (1, 1)) -> np.ndarray:
    """Returns the pairs of a kernel that skips each tile of (queries, keys) in which a causal mask or a window leaves
    none. What is hidden by segments, which differ from row to row, is not skipped."""
    before, after = spec.query_length, 0 if spec.causal else spec.key_length
    if spec.window is not None:
        before, after = Mask(spec.causal, window=spec.window).reach
    first = np.arange(0, spec.query_length, tile[0])  # query of each row of tiles
    end = np.minimum(first + tile[0], spec.query_length)
    low = np.maximum(first - before, 0) // tile[1] * tile[1]  # key
    high = np.minimum(-(-(end + after) // tile[1]) * tile[1], spec.key_length)
    parts = np.array_split((end - first) * (high - low), spec.sequence)
    return np.array([part.sum() for part in parts], float)
