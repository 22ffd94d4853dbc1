"""Windows computed by blocks, and a token that sees all (Longformer: Beltagy et al. 2020, arXiv 2004.05150, section 3).

The queries of a block of w tokens, half a window, meet the keys of their block and of the two beside it, in which lie
all that they see; so a row of T tokens multiplies 3 w T pairs, and holds as many logits.

The first token of each segment is global. The others see it from wherever they stand. It sees its whole segment, by
queries, keys and values of maps of its own (section 3.1). Which token that is, is known of the segment ids, so that a
row may hold many texts; and each has one, so that a token has one key more, and one more query to be asked by.

NOTE In transformers which tokens are global is an argument of each call; LongformerForSequenceClassification takes the
first one where there is none. Several global tokens of a text, as those of a question, are not known here.
"""

from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.attention_mask import PADDING, Mask, heads_last, masked_logits, pad, weighted_sum
from pretrainax.layers.attention_spec import KeyBlocks
from pretrainax.layers.multi_head import MultiHeadAttention
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.sparse_attention.base import AttentionByBlocks, Dropout
from pretrainax.sharding.rules import add_partition_rules

add_partition_rules(
    (
        (r"blocks/self_attention/global_(query|key|value)/kernel", "layers d_model num_heads head_dim"),
        (r"blocks/self_attention/global_(query|key|value)/bias", "layers num_heads head_dim"),
    )
)


class WindowAttention(AttentionByBlocks):
    """Attends to a window, and to the first token of each segment, which attends to all of it."""

    @staticmethod
    def flops(config: ModelConfig, length: int, read: int) -> int:
        # a map has a query's and out's FLOPs, or a key's and a value's; the global ones are three more
        maps = 7 if _has_global(config) else 4
        return MultiHeadAttention.flops(config, length, read) // 4 * maps

    @staticmethod
    def kept(config: ModelConfig) -> tuple[int, int]:
        asks, read = MultiHeadAttention.kept(config)
        return (asks + asks // 2, 2 * read) if _has_global(config) else (asks, read)

    @staticmethod
    def blocks(config: ModelConfig, length: int) -> KeyBlocks:
        assert config.window is not None
        return KeyBlocks(config.window // 2, sides=1, whole=2 if _has_global(config) else 0)

    @nn.nowrap
    def read(
        self, x: jax.Array, qkv: tuple[jax.Array, ...], mask: Mask, positions: PositionTerms, scale: float
    ) -> jax.Array:
        if not _has_global(self.config):
            return near(*qkv, mask, None, scale, self.dropout())
        first = first_tokens(mask.query_segment_ids)
        y = near(*qkv, mask, first, scale, self.dropout())
        whole = seen_by_first(*self.heads(x, positions, "global_"), first, scale, self.dropout())
        is_first = first == jnp.arange(x.shape[1])[None]
        return jnp.where(is_first[..., None, None], whole, y)


def _has_global(config: ModelConfig) -> bool:
    return config.sparse_attention.global_tokens == "first"


def first_tokens(segment_ids: jax.Array) -> jax.Array:
    """Returns where the segment of each token begins, an index into the row, [B, T] -> [B, T]."""
    is_first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(is_first, jnp.arange(segment_ids.shape[1])[None], 0), axis=1)


def near(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, first: Optional[jax.Array], scale: float, drop: Dropout
) -> jax.Array:
    """Returns what queries read of their window, and of the first token of their segment, [B, T, H, K].

    Args:
      q, k, v: [B, T, H, K].
      mask: of segments, with a window.
      first: [B, T], of `first_tokens`; None: none is seen beyond the window.
    """
    b, t, h, d = q.shape
    size = min(mask.reach[0], t)  # of a block
    ids = key_ids = mask.query_segment_ids
    if first is not None:  # a key of its own, below
        key_ids = jnp.where(first == jnp.arange(t)[None], PADDING, ids)
    # [B, T, …] -> [B · N, w, …]; [B, T, …] -> [B · N, 3 w, …]
    queries, keys, values = blocked(q, size), with_neighbours(k, size), with_neighbours(v, size)
    of_block = Mask(
        query_segment_ids=blocked(ids, size, PADDING),
        key_segment_ids=with_neighbours(key_ids, size, PADDING),
        window=mask.window,
        query_positions=jnp.arange(size) + (keys.shape[1] - size) // 2,
    )
    logits = masked_logits(queries, keys, of_block, None, scale, None)  # [B · N, H, 1, w, 3 w]
    largest = logits.max(-1)
    if first is not None:
        of_first = jnp.einsum("BTHK,BTHK->BTH", q, _at(k, first), preferred_element_type=jnp.float32) * scale
        # [B, T, H] -> [B · N, w, H] -> [B · N, H, 1, w]
        of_first = blocked(of_first, size).swapaxes(1, 2)[:, :, None]
        largest = jnp.maximum(largest, of_first)
    largest = jax.lax.stop_gradient(largest)
    weights = jnp.exp(logits - largest[..., None])
    total = weights.sum(-1)
    y = weighted_sum(weights if drop is None else drop(weights), values)
    if first is not None:
        weight = jnp.exp(of_first - largest)
        total += weight
        weight = weight if drop is None else drop(weight)
        value = blocked(_at(v, first), size).swapaxes(1, 2)[:, :, None]  # [B · N, H, 1, w, K]
        y += weight[..., None] * value.astype(jnp.float32)
    # [B · N, w, H, K] -> [B, N · w, H, K] -> [B, T, H, K]
    return heads_last(y / total[..., None]).reshape(b, -1, h, d)[:, :t].astype(q.dtype)


def seen_by_first(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, scale: float, drop: Dropout) -> jax.Array:
    """Returns what the first token of each segment reads of all of it, [B, T, H, K]; zeros where others stand.

    Each token is asked by one query, that of its segment; sums over segments are laid where these begin.

    NOTE Queries are made of all tokens, as nobody knows how many are first: a fifteenth of the products of a block.
    """

    def over_segments(reduce, y):
        return jax.vmap(lambda row, to: reduce(row, to, row.shape[0]))(y, first)

    logits = jnp.einsum("BTHK,BTHK->BTH", _at(q, first), k, preferred_element_type=jnp.float32) * scale
    largest = jax.lax.stop_gradient(_at(over_segments(jax.ops.segment_max, logits), first))
    weights = jnp.exp(logits - largest)
    total = over_segments(jax.ops.segment_sum, weights)
    weights = weights if drop is None else drop(weights)
    y = over_segments(jax.ops.segment_sum, weights[..., None] * v.astype(jnp.float32))
    return (y / jnp.where(total > 0, total, 1.0)[..., None]).astype(v.dtype)


def blocked(x: jax.Array, size: int, value: int = 0) -> jax.Array:
    """Cuts rows into blocks, the last one filled up: [B, T, …] -> [B · N, w, …]."""
    return pad(x, 1, size, value).reshape(-1, size, *x.shape[2:])


def with_neighbours(x: jax.Array, size: int, value: int = 0) -> jax.Array:
    """Returns each block with those on both sides, [B, T, …] -> [B · N, 3 w, …]; the only block of a row as it is."""
    if x.shape[1] <= size:
        return blocked(x, size, value)
    # [B, T, …] -> [B, N, w, …] -> [B, N + 2, w, …] -> [B, N, 3 w, …]
    x = pad(x, 1, size, value).reshape(x.shape[0], -1, size, *x.shape[2:])
    x = jnp.pad(x, ((0, 0), (1, 1), *((0, 0),) * (x.ndim - 2)), constant_values=value)
    x = jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], axis=2)
    return x.reshape(-1, 3 * size, *x.shape[3:])


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the tokens at `index` [B, T] of x [B, T, …]."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)
