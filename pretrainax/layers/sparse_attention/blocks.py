"""Blocks: the neighbours, the first and the last one, and random ones (BigBird: Zaheer et al. 2020, arXiv 2007.14062).

A row of T tokens is N blocks of b. The first and the last block are global (section 2, "BigBird-ITC"): they meet all
keys, and all others meet them. A block between meets its neighbours on both sides, itself, these two, and r blocks
drawn for each head of each layer: (5 + r) b keys a query, whatever T. Rows of at most 5 + 2 r blocks meet all keys.

The draws are part of the model: NumPy's stream of the seed that is the layer's number, as the released weights were
trained, and as transformers draws in training.

NOTE In transformers' evaluation all random blocks are the first one, which then counts r + 1 times;
`sparse_attention.drawn` says which. It drops no weights of attention in blocks, and here they are dropped.
NOTE Blocks are those of a row, so that rows with several texts are computed otherwise than each text by itself: no
token sees another text, and only the first and the last text of a row have a global block.
"""

import functools
from collections.abc import Iterator
from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import ModelConfig, RandomBlocks
from pretrainax.layers.attention import Mask, Weights, attention_of_weights
from pretrainax.layers.attention_mask import FORBIDDEN, PADDING, pad
from pretrainax.layers.attention_spec import KeyBlocks
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.multi_head import register_attention
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.sparse_attention.base import AttentionByBlocks

_OLD_LENGTHS, _OLD_REACH = (1024, 3072, 4096), 1024  # whose draws are those of the paper, of the first 1,024 tokens


@register_attention
class BlockAttention(AttentionByBlocks):
    """Attends by blocks: to neighbours, to the first and the last one, and to random ones."""

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return isinstance(config.sparse_attention, RandomBlocks)

    @staticmethod
    def blocks(config: ModelConfig, length: int) -> Optional[KeyBlocks]:
        settings = config.sparse_attention
        if length <= settings.size * (5 + 2 * settings.random):
            return None
        return KeyBlocks(settings.size, sides=1, more=2 + settings.random, whole=2 * settings.size)

    @nn.nowrap
    def read(
        self, x: jax.Array, qkv: tuple[jax.Array, ...], mask: Mask, positions: PositionTerms, scale: float
    ) -> jax.Array:
        config, settings, length = self.config, self.config.sparse_attention, x.shape[1]
        weights, ids = Weights(self.dropout()), mask.query_segment_ids
        if self.blocks(config, length) is None:
            return attention_of_weights(*qkv, weights=weights, mask=Mask(False, ids, ids), scale=scale)
        size = settings.size
        q, k, v = (pad(y, 1, size) for y in qkv)
        ids = pad(ids, 1, size, PADDING)
        is_drawn = settings.drawn == "always" or not self.deterministic
        layers = range(config.num_layers) if is_drawn else range(1)
        tables = jnp.asarray(np.stack([key_blocks(config, ids.shape[1], i if is_drawn else None) for i in layers]))
        table = tables[mask.layer if is_drawn else 0]
        between = of_blocks(q, k, v, ids, table, scale, weights.drop)
        ends = [jnp.concatenate([y[:, :size], y[:, -size:]], axis=1) for y in (q, ids)]  # [B, 2 b, …]
        whole = attention_of_weights(ends[0], k, v, weights=weights, mask=Mask(False, ends[1], ids), scale=scale)
        return jnp.concatenate([whole[:, :size], between, whole[:, size:]], axis=1)[:, :length]


def of_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, table: jax.Array, scale: float, drop: Optional[Dropout]
) -> jax.Array:
    """Returns what the queries of all blocks but the first and the last read, [B, (N - 2) b, H, K].

    Args:
      q, k, v: [B, N b, H, K]; ids: their segments, [B, N b].
      table: [H, N - 2, M], of `key_blocks`.
    """
    blocks, heads, width = table.shape[1] + 2, q.shape[2], q.shape[3]

    def met(x):  # [B, N, H, b, K], [H, N - 2, M] -> [B, H, N - 2, M, b, K] -> [B, H, N - 2, M b, K]
        found = jax.vmap(lambda own, blocks: own[:, blocks], (2, 0), 1)(x, jnp.maximum(table, 0))
        return found.reshape(*found.shape[:3], -1, *x.shape[4:])

    # [B, N b, H, K] -> [B, N, b, H, K] -> [B, N, H, b, K]
    q, k, v = (x.reshape(x.shape[0], blocks, -1, heads, width).swapaxes(2, 3) for x in (q, k, v))
    ids = ids.reshape(ids.shape[0], blocks, 1, -1)
    key_ids = met(jnp.broadcast_to(ids, k.shape[:4]))
    is_met = jnp.repeat(table >= 0, k.shape[3], axis=2)[None]  # [1, H, N - 2, M b]
    allowed = ids[:, None, 1:-1, 0, :, None] == jnp.where(is_met, key_ids, PADDING)[:, :, :, None]
    queries = q[:, 1:-1].swapaxes(1, 2)  # [B, H, N - 2, b, K]
    logits = jnp.einsum("BHNTK,BHNSK->BHNTS", queries, met(k), preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(allowed, logits, FORBIDDEN), axis=-1)
    weights = (weights if drop is None else drop(weights)).astype(v.dtype)
    y = jnp.einsum("BHNTS,BHNSK->BHNTK", weights, met(v), preferred_element_type=jnp.float32)
    # [B, H, N - 2, b, K] -> [B, N - 2, b, H, K] -> [B, (N - 2) b, H, K]
    return y.transpose(0, 2, 3, 1, 4).reshape(y.shape[0], -1, heads, width).astype(v.dtype)


def key_blocks(config: ModelConfig, length: int, layer: Optional[int]) -> np.ndarray:
    """Returns the blocks that each block but the first and the last meets, [H, N - 2, 5 + r] int32; -1: one less.

    Args:
      length: of a row, a multiple of the size of a block.
      layer: its number; None: the random ones are the first block.
    """
    settings, heads = config.sparse_attention, config.num_heads
    blocks = length // settings.size
    own = np.arange(1, blocks - 1)[:, None]
    fixed = np.concatenate([0 * own, own - 1, own, own + 1, 0 * own + blocks - 1], axis=1)
    fixed[0, 1], fixed[-1, 3] = -1, -1  # their neighbour is the first block, or the last
    drawn = np.zeros((heads, blocks - 2, settings.random), int)
    if layer is not None:
        drawn = random_blocks(layer, heads, length, settings.size, settings.random, config.position.max_length)
    return np.concatenate([np.broadcast_to(fixed, (heads, *fixed.shape)), drawn], axis=2).astype(np.int32)


@functools.cache
def random_blocks(layer: int, heads: int, length: int, size: int, count: int, longest: int) -> np.ndarray:
    """Returns the blocks that are drawn for each head and each block but the first and the last, [H, N - 2, r].

    Of most lengths, each draw is of the first 5 + 2 r blocks; of those that the paper trained, of the first 1,024
    tokens, and as many draws are made as the longest row needs.
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
    """Returns the blocks below `reach` that another block may draw: none that it meets already, in the same order."""
    met = {block - 1, block, block + 1, 0, reach - 1}
    met |= {reach - 2} if block == 1 else {1} if block == reach - 2 else set()
    return np.array([other for other in permuted if other not in met])


def _old_pools(blocks: int, size: int) -> Iterator[np.ndarray]:
    """Yields what each block but the first and the last draws of; some pools have blocks that it meets already."""
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
