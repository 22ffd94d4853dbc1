"""Windows computed by blocks, and tokens that see all (Longformer: Beltagy et al. 2020, arXiv 2004.05150, section 3).

The queries of a block of w tokens, half a window, meet the keys of their block and of the two beside it, in which lie
all that they see; so a row of T tokens multiplies 3 w T pairs, and holds as many logits.

Global tokens are seen by the others of their segment from wherever these stand. They see their whole segment, by
queries, keys and values of maps of their own (section 3.1). Where that is the first token of each segment, it is known
of the segment ids, so that a row may hold many texts; and each has one, so that a token has one key more, and one more
query to be asked by. Where it is the question of a row (section 6.2), the batch says which tokens these are, all of
them among the first `longest_question`, which are keys more of each token of the row, and queries.

NOTE In transformers which tokens are global is an argument of each call; LongformerForSequenceClassification takes the
first one where there is none, and LongformerForQuestionAnswering all before the first separator.
"""

from collections.abc import Callable
from typing import NamedTuple, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig, SlidingWindows
from pretrainax.layers.attention import Weights, attention_of_weights
from pretrainax.layers.attention_mask import FORBIDDEN, PADDING, Mask, heads_last, masked_logits, pad, weighted_sum
from pretrainax.layers.attention_spec import KeyBlocks
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.multi_head import MultiHeadAttention, register_attention
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.sparse_attention.base import AttentionByBlocks


@register_attention
class WindowAttention(AttentionByBlocks):
    """Attends to a window, and to the global tokens of each segment, which attend to all of it."""

    partition_rules = (
        (r"blocks/self_attention/global_(query|key|value)/kernel", "layers d_model num_heads head_dim"),
        (r"blocks/self_attention/global_(query|key|value)/bias", "layers num_heads head_dim"),
    )

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return isinstance(config.sparse_attention, SlidingWindows)

    @staticmethod
    def flops(config: ModelConfig, length: int, read: int) -> int:
        # a map has a query's and out's FLOPs, or a key's and a value's; the global ones are three more
        maps = 7 if _has_global(config) else 4
        return MultiHeadAttention.flops(config, length, read) // 4 * maps

    @staticmethod
    def blocks(config: ModelConfig, length: int) -> KeyBlocks:
        assert config.window is not None
        count = {"none": 0, "first": 1, "question": min(config.sparse_attention.longest_question, length)}
        return KeyBlocks(config.window // 2, sides=1, whole=2 * count[config.sparse_attention.global_tokens])

    @nn.nowrap
    def read(
        self, x: jax.Array, qkv: tuple[jax.Array, ...], mask: Mask, positions: PositionTerms, scale: float
    ) -> jax.Array:
        if not _has_global(self.config):
            return near(*qkv, mask, None, scale, self.dropout())
        of_global = self.heads(x, positions, "global_")
        if self.config.reads_question:
            count = min(self.config.sparse_attention.longest_question, x.shape[1])
            far = of_question(*qkv, mask, count, scale)
            y = near(*qkv, mask, far, scale, self.dropout())
            whole = seen_by_question(*of_global, mask, count, scale, self.dropout())
            asked = jnp.where(far.is_key[:, :count, None, None], whole, y[:, :count])
            return jnp.concatenate([asked, y[:, count:]], axis=1)
        first = first_tokens(mask.query_segment_ids)
        far = of_first(*qkv, first, scale)
        y = near(*qkv, mask, far, scale, self.dropout())
        whole = seen_by_first(*of_global, first, scale, self.dropout())
        return jnp.where(far.is_key[..., None, None], whole, y)


def _has_global(config: ModelConfig) -> bool:
    return config.sparse_attention.global_tokens != "none"


class Far(NamedTuple):
    """Holds what tokens see beyond their window."""

    is_key: jax.Array  # [B, T] bool, the global tokens
    logits: jax.Array  # [B, T, H, G], of each token for the global ones of its segment
    summed: Callable[[jax.Array], jax.Array]  # weights [B, T, H, G] -> the sum of values [B, T, H, K], float32


def first_tokens(segment_ids: jax.Array) -> jax.Array:
    """Returns where the segment of each token begins, an index into the row, [B, T] -> [B, T]."""
    is_first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(is_first, jnp.arange(segment_ids.shape[1])[None], 0), axis=1)


def of_first(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, scale: float) -> Far:
    """Returns what tokens see of the first one of their segment; first: [B, T], of `first_tokens`."""
    logits = jnp.einsum("BTHK,BTHK->BTH", q, _at(k, first), preferred_element_type=jnp.float32) * scale
    value = _at(v, first).astype(jnp.float32)
    return Far(first == jnp.arange(q.shape[1])[None], logits[..., None], lambda weights: weights * value)


def of_question(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, count: int, scale: float) -> Far:
    """Returns what tokens see of the question, which is in the first `count` of a row: where the mask has a prefix."""
    ids, is_key = mask.query_segment_ids, (mask.prefix > 0) & (jnp.arange(q.shape[1])[None] < count)
    logits = jnp.einsum("BTHK,BGHK->BTHG", q, k[:, :count], preferred_element_type=jnp.float32) * scale
    seen = is_key[:, None, :count] & (ids[:, :, None] == ids[:, None, :count])  # [B, T, G]

    def summed(weights):
        values = v[:, :count]
        return jnp.einsum("BTHG,BGHK->BTHK", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)

    return Far(is_key, jnp.where(seen[:, :, None], logits, FORBIDDEN), summed)


def near(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, far: Optional[Far], scale: float, drop: Optional[Dropout]
) -> jax.Array:
    """Returns what queries read of their window, and of the global tokens of their segment, [B, T, H, K].

    Args:
      q, k, v: [B, T, H, K].
      mask: of segments, with a window.
      far: None: none is seen beyond the window.
    """
    b, t, h, d = q.shape
    size = min(mask.reach[0], t)  # of a block
    ids = key_ids = mask.query_segment_ids
    if far is not None:  # keys of their own, below
        key_ids = jnp.where(far.is_key, PADDING, ids)
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
    if far is not None:
        # [B, T, H, G] -> [B · N, w, H, G] -> [B · N, H, 1, w, G]
        of_far = blocked(far.logits, size).swapaxes(1, 2)[:, :, None]
        largest = jnp.maximum(largest, of_far.max(-1))
    largest = jax.lax.stop_gradient(largest)
    weights = jnp.exp(logits - largest[..., None])
    total = weights.sum(-1)
    y = weighted_sum(weights if drop is None else drop(weights), values)

    def in_rows(x):  # [B · N, H, 1, w, …] -> [B · N, w, H, …] -> [B, N · w, H, …] -> [B, T, H, …]
        return heads_last(x).reshape(b, -1, h, x.shape[-1])[:, :t]

    if far is None:
        return in_rows(y / total[..., None]).astype(q.dtype)
    weights = jnp.exp(of_far - largest[..., None])
    total += weights.sum(-1)
    y = in_rows(y) + far.summed(in_rows(weights if drop is None else drop(weights)))
    return (y / in_rows(total[..., None])).astype(q.dtype)


def seen_by_first(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, scale: float, drop: Optional[Dropout]
) -> jax.Array:
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


def seen_by_question(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, count: int, scale: float, drop: Optional[Dropout]
) -> jax.Array:
    """Returns what each of the first `count` tokens reads of all of its segment, [B, G, H, K]."""
    ids = mask.query_segment_ids
    whole = Mask(False, ids[:, :count], ids)
    return attention_of_weights(q[:, :count], k, v, weights=Weights(drop), mask=whole, scale=scale)


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
