"""Block-sparse attention to neighbours, to the first and the last block, and to random blocks (BigBird).

Source: Zaheer et al. 2020, arXiv 2007.14062.

A row of T tokens is split into N blocks of b tokens. The first and the last block are global (section 2,
"BigBird-ITC"): they attend to all keys, and all other blocks attend to them. Each of the other blocks attends to its
neighbours on both sides, to itself, to the two global blocks, and to r random blocks, which are drawn for each head of
each layer. Each query therefore has (5 + r) b keys for any T. In rows of at most 5 + 2 r blocks, every token attends to
all keys.

The random blocks are part of the model. They are drawn with NumPy's generator and the layer index as its seed, as in
the training of the released weights, and as in transformers in training.

NOTE In evaluation, transformers uses the first block in place of all random blocks, so the first block counts r + 1
times; `sparse_attention.drawn` selects the behaviour. transformers does not support dropout of block attention weights,
but this module does.

NOTE A row is split into blocks regardless of its segments. The result for a row with several segments therefore differs
from the results for each segment alone. No token attends to a different segment, and only the first and the last
segment of a row have a global block.
"""

import functools
from collections.abc import Iterator
from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import ModelConfig, RandomBlocks
from pretrainax.layers.attention import Mask, attention
from pretrainax.layers.attention_mask import FORBIDDEN, PADDING, pad
from pretrainax.layers.attention_spec import KeyBlocks, Weights
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.multi_head import register_attention
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.sparse_attention.base import BlockSparseAttention

# For rows of these lengths, random blocks are drawn from the first 1,024 tokens, as in the paper's training.
_PAPER_LENGTHS, _PAPER_POOL_TOKENS = (1024, 3072, 4096), 1024


@register_attention
class BlockAttention(BlockSparseAttention):
    """Block-sparse attention to neighbours, to the first and the last block, and to random blocks."""

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return isinstance(config.sparse_attention, RandomBlocks)

    @staticmethod
    def blocks(config: ModelConfig, length: int) -> Optional[KeyBlocks]:
        settings = config.sparse_attention
        if length <= settings.size * (5 + 2 * settings.random):
            return None
        return KeyBlocks(settings.size, sides=1, extra_blocks=2 + settings.random, global_tokens=2 * settings.size)

    @nn.nowrap
    def attend(
        self, x: jax.Array, qkv: tuple[jax.Array, ...], mask: Mask, positions: PositionTerms, scale: float
    ) -> jax.Array:
        config, settings, length = self.config, self.config.sparse_attention, x.shape[1]
        weights, ids = Weights(self.dropout()), mask.query_segment_ids
        if self.blocks(config, length) is None:
            return attention(*qkv, weights=weights, mask=Mask(False, ids, ids), scale=scale)
        size = settings.size
        q, k, v = (pad(y, 1, size) for y in qkv)
        ids = pad(ids, 1, size, PADDING)
        is_drawn = settings.drawn == "always" or not self.deterministic
        layers = range(config.num_layers) if is_drawn else range(1)
        tables = jnp.asarray(np.stack([key_blocks(config, ids.shape[1], i if is_drawn else None) for i in layers]))
        table = tables[mask.layer if is_drawn else 0]
        inner_output = block_attention(q, k, v, ids, table, scale, weights.drop)
        global_inputs = [jnp.concatenate([y[:, :size], y[:, -size:]], axis=1) for y in (q, ids)]  # [B, 2 b, …]
        global_output = attention(
            global_inputs[0], k, v, weights=weights, mask=Mask(False, global_inputs[1], ids), scale=scale
        )
        return jnp.concatenate([global_output[:, :size], inner_output, global_output[:, size:]], axis=1)[:, :length]


def block_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, table: jax.Array, scale: float, drop: Optional[Dropout]
) -> jax.Array:
    """Computes attention for the queries of all blocks except the first and the last, [B, (N - 2) b, H, K].

    Args:
      q, k, v: [B, N b, H, K]; ids: their segment ids, [B, N b].
      table: [H, N - 2, M], the key blocks of each query block, from `key_blocks`.
      scale: the factor of the logits.
      drop: optional dropout for the attention weights.
    """
    blocks, heads, width = table.shape[1] + 2, q.shape[2], q.shape[3]

    def select(x):  # [B, N, H, b, K], [H, N - 2, M] -> [B, H, N - 2, M, b, K] -> [B, H, N - 2, M b, K]
        selected = jax.vmap(lambda keys, indices: keys[:, indices], (2, 0), 1)(x, jnp.maximum(table, 0))
        return selected.reshape(*selected.shape[:3], -1, *x.shape[4:])

    # [B, N b, H, K] -> [B, N, b, H, K] -> [B, N, H, b, K]
    q, k, v = (x.reshape(x.shape[0], blocks, -1, heads, width).swapaxes(2, 3) for x in (q, k, v))
    ids = ids.reshape(ids.shape[0], blocks, 1, -1)
    key_ids = select(jnp.broadcast_to(ids, k.shape[:4]))
    is_selected = jnp.repeat(table >= 0, k.shape[3], axis=2)[None]  # [1, H, N - 2, M b]
    allowed = ids[:, None, 1:-1, 0, :, None] == jnp.where(is_selected, key_ids, PADDING)[:, :, :, None]
    queries = q[:, 1:-1].swapaxes(1, 2)  # [B, H, N - 2, b, K]
    logits = jnp.einsum("BHNTK,BHNSK->BHNTS", queries, select(k), preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(allowed, logits, FORBIDDEN), axis=-1)
    weights = (weights if drop is None else drop(weights)).astype(v.dtype)
    y = jnp.einsum("BHNTS,BHNSK->BHNTK", weights, select(v), preferred_element_type=jnp.float32)
    # [B, H, N - 2, b, K] -> [B, N - 2, b, H, K] -> [B, (N - 2) b, H, K]
    return y.transpose(0, 2, 3, 1, 4).reshape(y.shape[0], -1, heads, width).astype(v.dtype)


def key_blocks(config: ModelConfig, length: int, layer: Optional[int]) -> np.ndarray:
    """Returns the indices of the key blocks that each query block attends to, [H, N - 2, 5 + r] int32.

    The first and the last query block are excluded, because they attend to all keys. -1 marks an unused entry.

    Args:
      length: number of tokens of a row, a multiple of the block size.
      layer: layer index, which determines the random blocks. If None, all random blocks are the first block.
    """
    settings, heads = config.sparse_attention, config.num_heads
    blocks = length // settings.size
    index = np.arange(1, blocks - 1)[:, None]
    fixed_blocks = np.concatenate([0 * index, index - 1, index, index + 1, 0 * index + blocks - 1], axis=1)
    fixed_blocks[0, 1], fixed_blocks[-1, 3] = -1, -1  # one neighbour is a global block, which already has an entry
    drawn_blocks = np.zeros((heads, blocks - 2, settings.random), int)
    if layer is not None:
        drawn_blocks = random_blocks(layer, heads, length, settings.size, settings.random, config.position.max_length)
    return np.concatenate([np.broadcast_to(fixed_blocks, (heads, *fixed_blocks.shape)), drawn_blocks], axis=2).astype(
        np.int32
    )


@functools.cache
def random_blocks(layer: int, heads: int, length: int, size: int, count: int, longest: int) -> np.ndarray:
    """Draws the random blocks of each head, for each block except the first and the last, [H, N - 2, r].

    For most lengths, the random blocks are drawn from the first 5 + 2 r blocks. For the lengths used in the paper's
    training, they are drawn from the first 1,024 tokens. They are then drawn for a row of `longest` tokens, and only
    the draws of the first N - 2 blocks are used.

    Args:
      layer: layer index, the seed of the generator.
      heads: number of heads, H.
      length: number of tokens of a row; size: number of tokens of a block.
      count: number of random blocks, r.
      longest: maximum number of tokens of a row.
    """
    generator, blocks = np.random.RandomState(layer), length // size
    pool_size = 5 + 2 * count
    if length in _PAPER_LENGTHS and pool_size * size < _PAPER_POOL_TOKENS:
        pools = [list(_paper_pools(max(longest, length) // size, size)) for _ in range(heads)]
        draws = [[generator.permutation(pool)[:count] for pool in head_pools] for head_pools in pools]
        return np.array(draws)[:, : blocks - 2]
    draws = [
        [_allowed_blocks(generator.permutation(pool_size), i, pool_size)[:count] for _ in range(heads)]
        for i in range(1, blocks - 1)
    ]
    return np.array(draws).swapaxes(0, 1)


def _allowed_blocks(permuted: np.ndarray, block: int, pool_size: int) -> np.ndarray:
    """Returns the blocks of `permuted` that `block` does not already attend to, in the same order.

    Args:
      permuted: a permutation of the first `pool_size` blocks.
    """
    attended = {block - 1, block, block + 1, 0, pool_size - 1}
    attended |= {pool_size - 2} if block == 1 else {1} if block == pool_size - 2 else set()
    return np.array([candidate for candidate in permuted if candidate not in attended])


def _paper_pools(blocks: int, size: int) -> Iterator[np.ndarray]:
    """Yields the pool from which each block's random blocks are drawn, for all blocks except the first and the last.

    A pool may contain blocks that the block already attends to.

    Args:
      blocks: number of blocks of the longest row.
      size: number of tokens of a block.
    """
    middle = np.arange(1, blocks - 1)
    last = _PAPER_POOL_TOKENS // size - 1
    for block in range(1, blocks - 1):
        if block <= 2:
            yield middle[block + 1 : last]
        elif block >= blocks - 3 or block - 2 > last:
            yield middle[:last]
        elif block + 1 == last:
            yield middle[: block - 2]
        else:
            yield np.concatenate([middle[: block - 2], middle[block + 1 : last]])
