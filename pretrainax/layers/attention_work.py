"""Counts the query-key pairs that an attention backend computes.

A causal mask masks half of the pairs, and a window masks more. Only a kernel that skips masked pairs does less work.
Such a kernel processes tiles of pairs and skips the tiles in which every pair is masked.
"""

import numpy as np

from pretrainax.layers.attention_mask import Mask
from pretrainax.layers.attention_spec import AttentionSpec


def all_pairs(spec: AttentionSpec) -> np.ndarray:
    """Counts the query-key pairs that a kernel computes if it skips no tiles.

    Returns one count per shard of the sequence dimension, [spec.sequence], for one row and one head. For block-sparse
    attention, the counts cover only the blocks attended to.
    """
    pairs = spec.query_length * spec.key_length if spec.blocks is None else spec.blocks.pairs(spec.query_length)
    return np.full(spec.sequence, pairs / spec.sequence)


def unskipped_pairs(spec: AttentionSpec, tile: tuple[int, int] = (1, 1)) -> np.ndarray:
    """Counts the query-key pairs that a kernel computes if it skips masked tiles.

    Returns one count per shard of the sequence dimension, [spec.sequence], for one row and one head. The kernel skips
    each tile in which a causal mask or a window masks every pair. It does not skip pairs of different segments, because
    segments differ between rows.

    Args:
      tile: numbers of queries and keys per tile; (1, 1) counts exactly the pairs that the causal mask and the window
        allow.
    """
    before, after = spec.query_length, 0 if spec.causal else spec.key_length
    if spec.window is not None:
        before, after = Mask(spec.causal, window=spec.window).reach
    first_query = np.arange(0, spec.query_length, tile[0])  # one per row of tiles
    query_end = np.minimum(first_query + tile[0], spec.query_length)
    first_key = np.maximum(first_query - before, 0) // tile[1] * tile[1]
    key_end = np.minimum(-(-(query_end + after) // tile[1]) * tile[1], spec.key_length)
    shards = np.array_split((query_end - first_query) * (key_end - first_key), spec.sequence)
    return np.array([shard.sum() for shard in shards], float)
