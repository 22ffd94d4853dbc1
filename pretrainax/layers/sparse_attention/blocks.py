"""Block-sparse attention to neighbours, to the first and the last block, and to random blocks (BigBird).

Source: Zaheer et al. 2020, arXiv 2007.14062.

A row of T tokens is split into N blocks of b tokens. The first and the last block are global (section 2,
"BigBird-ITC"): they attend to all keys, and all other blocks attend to them. Each of the other blocks attends to its
neighbours on both sides, to itself, to the two global blocks, and to r random blocks, which are drawn for each head of
each layer. Each query therefore has (5 + r) b keys for any T. In rows of at most 5 + 2 r blocks, every token attends to
all keys.

The random blocks are part of the model. They come from NumPy's generator with the layer number as its seed, as in the
training of the released weights, and as in transformers in training.

NOTE In evaluation, transformers uses the first block in place of all random blocks, so the first block counts r + 1
times; `sparse_attention.drawn` selects the behaviour. transformers does not support dropout of block attention weights,
but this module does.

NOTE A row is split into blocks regardless of its segments. A row with several segments is therefore computed
differently from each segment alone. No token attends to a different segment, and only the first and the last segment of
a row have a global block.
"""

import functools
from collections.abc import Iterator
from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import ModelConfig, RandomBlocks
from pretrainax.layers.attention import Mask, Weights, attention_with_weights
from pretrainax.layers.attention_mask import FORBIDDEN, PADDING, pad
from pretrainax.layers.attention_spec import KeyBlocks
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.multi_head import register_attention
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.sparse_attention.base import BlockSparseAttention

# For rows of these lengths, random blocks are drawn from the first 1,024 tokens, as in the paper's training.
_OLD_LENGTHS, _OLD_REACH = (1024, 3072, 4096), 1024


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
            return attention_with_weights(*qkv, weights=weights, mask=Mask(False, ids, ids), scale=scale)
        size = settings.size
        q, k, v = (pad(y, 1, size) for y in qkv)
        ids = pad(ids, 1, size, PADDING)
        is_drawn = settings.drawn == "always" or not self.deterministic
        layers = range(config.num_layers) if is_drawn else range(1)
        tables = jnp.asarray(np.stack([key_blocks(config, ids.shape[1], i if is_drawn else None) for i in layers]))
        table = tables[mask.layer if is_drawn else 0]
        between = block_attention(q, k, v, ids, table, scale, weights.drop)
        ends = [jnp.concatenate([y[:, :size], y[:, -size:]], axis=1) for y in (q, ids)]  # [B, 2 b, …]
        whole = attention_with_weights(ends[0], k, v, weights=weights, mask=Mask(False, ends[1], ids), scale=scale)
        return jnp.concatenate([whole[:, :size], between, whole[:, size:]], axis=1)[:, :length]


def block_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, table: jax.Array, scale: float, drop: Optional[Dropout]
) -> jax.Array:
    """Computes attention for the queries of all blocks except the first and the last, [B, (N - 2) b, H, K].

    Args:
      q, k, v: [B, N b, H, K]; ids: their segment ids, [B, N b].
      table: [H, N - 2, M], the blocks of keys of each block, from `key_blocks`.
      scale: the factor of the logits.
      drop: dropout of the attention weights; None: no dropout.
    """
    blocks, heads, width = table.shape[1] + 2, q.shape[2], q.shape[3]

    def select(x):  # [B, N, H, b, K], [H, N - 2, M] -> [B, H, N - 2, M, b, K] -> [B, H, N - 2, M b, K]
        selected = jax.vmap(lambda own, blocks: own[:, blocks], (2, 0), 1)(x, jnp.maximum(table, 0))
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
    """Returns the blocks of keys of each block except the first and the last, [H, N - 2, 5 + r] int32.

    An entry of -1 is not used.

    Args:
      length: number of tokens of a row, a multiple of the block size.
      layer: layer number, which determines the random blocks; None: all random blocks are the first block.
    """
    settings, heads = config.sparse_attention, config.num_heads
    blocks = length // settings.size
    own = np.arange(1, blocks - 1)[:, None]
    fixed = np.concatenate([0 * own, own - 1, own, own + 1, 0 * own + blocks - 1], axis=1)
    fixed[0, 1], fixed[-1, 3] = -1, -1  # one neighbour is a global block, which is an entry already
    drawn = np.zeros((heads, blocks - 2, settings.random), int)
    if layer is not None:
        drawn = random_blocks(layer, heads, length, settings.size, settings.random, config.position.max_length)
    return np.concatenate([np.broadcast_to(fixed, (heads, *fixed.shape)), drawn], axis=2).astype(np.int32)


@functools.cache
def random_blocks(layer: int, heads: int, length: int, size: int, count: int, longest: int) -> np.ndarray:
    """Returns the random blocks of each head, for each block except the first and the last, [H, N - 2, r].

    For most lengths, the random blocks are drawn from the first 5 + 2 r blocks. For the lengths in the paper's
    training, they are drawn from the first 1,024 tokens, with as many draws as the longest row needs.

    Args:
      layer: layer number, the seed of the generator.
      heads: number of heads, H.
      length: number of tokens of a row; size: number of tokens of a block.
      count: number of random blocks, r.
      longest: maximum number of tokens of a row.
    """
    random, blocks = np.random.RandomState(layer), length // size
    reach = 5 + 2 * count
    if length in _OLD_LENGTHS and reach * size < _OLD_REACH:
        pools = [list(_old_pools(max(longest, length) // size, size)) for _ in range(heads)]
        drawn = [[random.permutation(pool)[:count] for pool in of_head] for of_head in pools]
        return np.array(drawn)[:, : blocks - 2]
    drawn = [[_legal(random.permutation(reach), i, reach)[:count] for _ in range(heads)] for i in range(1, blocks - 1)]
    return np.array(drawn).swapaxes(0, 1)


def _legal(permuted: np.ndarray, block: int, reach: int) -> np.ndarray:
    """Returns the blocks of `permuted` that a block may draw, in the same order.

    These are the blocks to which `block` does not attend already.

    Args:
      permuted: a permutation of the first `reach` blocks.
    """
    attended = {block - 1, block, block + 1, 0, reach - 1}
    attended |= {reach - 2} if block == 1 else {1} if block == reach - 2 else set()
    return np.array([other for other in permuted if other not in attended])


def _old_pools(blocks: int, size: int) -> Iterator[np.ndarray]:
    """For each block except the first and the last, yields the pool of blocks from which its random blocks are drawn.

    A pool may contain blocks that the block already attends to.

    Args:
      blocks: number of blocks of the longest row.
      size: number of tokens of a block.
    """
    middle = np.arange(1, blocks - 1)
    last = _OLD_REACH // size - 1
    for block in range(1, blocks - 1):
        if block <= 2:
            yield middle[block + 1 : last]
        elif block >= blocks - 3 or block - 2 > last:
            yield middle[:last]
        elif block + 1 == last:
            yield middle[: block - 2]
        else:
            yield np.concatenate([middle[: block - 2], middle[block + 1 : last]])
