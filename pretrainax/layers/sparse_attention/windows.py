"""Sliding-window attention that is computed in blocks, with global tokens (Longformer).

Source: Beltagy et al. 2020, arXiv 2004.05150, section 3.

A block has w tokens, where w is half a window. The queries of a block attend to keys of their block and of the two
adjacent blocks, which contain the whole window. Attention in a row of T tokens therefore computes 3 w T logits.

All tokens of a segment attend to its global tokens. The global tokens attend to their whole segment, with separate
projections of queries, keys and values (section 3.1). There are two kinds of global tokens:

- The first token of each segment. The segment ids determine it, so a row may have many segments. Each segment has one
  global token. Each token therefore has one additional key and is a key of one additional query.
- The question of a row (section 6.2). The batch marks the tokens of the question, which are all among the first
  `longest_question` tokens. They are additional keys of each token of the row, and additional queries.

NOTE In transformers, the global tokens are an argument of each call. Without this argument,
LongformerForSequenceClassification uses the first token, and LongformerForQuestionAnswering uses all tokens before the
first separator.
"""

from collections.abc import Callable
from typing import NamedTuple, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig, SlidingWindows
from pretrainax.layers.attention import attention
from pretrainax.layers.attention_mask import FORBIDDEN, PADDING, Mask, heads_last, masked_logits, pad, weighted_sum
from pretrainax.layers.attention_spec import KeyBlocks, Weights
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.multi_head import MultiHeadAttention, register_attention
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.sparse_attention.base import BlockSparseAttention


@register_attention
class WindowAttention(BlockSparseAttention):
    """Attention of each token to its window and to the global tokens of its segment.

    Global tokens attend to their whole segment.
    """

    partition_rules = (
        (r"blocks/self_attention/global_(query|key|value)/kernel", "layers d_model num_heads head_dim"),
        (r"blocks/self_attention/global_(query|key|value)/bias", "layers num_heads head_dim"),
    )

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return isinstance(config.sparse_attention, SlidingWindows)

    @staticmethod
    def flops(config: ModelConfig, length: int, read: int) -> int:
        # `MultiHeadAttention.flops` counts four projections; global tokens have three more.
        num_projections = 7 if _has_global(config) else 4
        return MultiHeadAttention.flops(config, length, read) // 4 * num_projections

    @staticmethod
    def blocks(config: ModelConfig, length: int) -> KeyBlocks:
        assert config.window is not None
        count = {"none": 0, "first": 1, "question": min(config.sparse_attention.longest_question, length)}
        return KeyBlocks(config.window // 2, sides=1, global_tokens=2 * count[config.sparse_attention.global_tokens])

    @nn.nowrap
    def attend(
        self, x: jax.Array, qkv: tuple[jax.Array, ...], mask: Mask, positions: PositionTerms, scale: float
    ) -> jax.Array:
        if not _has_global(self.config):
            return window_attention(*qkv, mask, None, scale, self.dropout())
        global_qkv = self.heads(x, positions, "global_")
        if self.config.reads_question:
            count = min(self.config.sparse_attention.longest_question, x.shape[1])
            global_logits = question_logits(*qkv, mask, count, scale)
            y = window_attention(*qkv, mask, global_logits, scale, self.dropout())
            global_output = question_attention(*global_qkv, mask, count, scale, self.dropout())
            question = jnp.where(global_logits.is_key[:, :count, None, None], global_output, y[:, :count])
            return jnp.concatenate([question, y[:, count:]], axis=1)
        first = first_tokens(mask.query_segment_ids)
        global_logits = first_token_logits(*qkv, first, scale)
        y = window_attention(*qkv, mask, global_logits, scale, self.dropout())
        global_output = first_token_attention(*global_qkv, first, scale, self.dropout())
        return jnp.where(global_logits.is_key[..., None, None], global_output, y)


def _has_global(config: ModelConfig) -> bool:
    return config.sparse_attention.global_tokens != "none"


class GlobalLogits(NamedTuple):
    """The logits and the values of the global tokens, which are additional keys outside the window.

    Here G is the number of additional keys of each token.
    """

    is_key: jax.Array  # [B, T] bool, True at global tokens
    logits: jax.Array  # [B, T, H, G], logits of each token with the global tokens of its segment
    summed: Callable[[jax.Array], jax.Array]  # weights [B, T, H, G] -> weighted sum of values [B, T, H, K], float32


def first_tokens(segment_ids: jax.Array) -> jax.Array:
    """Returns the index in the row at which each token's segment begins, [B, T] -> [B, T]."""
    is_first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(is_first, jnp.arange(segment_ids.shape[1])[None], 0), axis=1)


def first_token_logits(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, scale: float) -> GlobalLogits:
    """Computes each token's logit with the first token of its segment, and looks up that first token's value.

    Args:
      first: [B, T], from `first_tokens`.
    """
    logits = jnp.einsum("BTHK,BTHK->BTH", q, _take_tokens(k, first), preferred_element_type=jnp.float32) * scale
    value = _take_tokens(v, first).astype(jnp.float32)
    return GlobalLogits(first == jnp.arange(q.shape[1])[None], logits[..., None], lambda weights: weights * value)


def question_logits(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, count: int, scale: float) -> GlobalLogits:
    """Computes each token's logits with the question tokens in its segment, and looks up the question tokens' values.

    The question consists of the tokens that `mask.prefix` marks among the first `count` tokens of a row.
    """
    ids, is_key = mask.query_segment_ids, (mask.prefix > 0) & (jnp.arange(q.shape[1])[None] < count)
    logits = jnp.einsum("BTHK,BGHK->BTHG", q, k[:, :count], preferred_element_type=jnp.float32) * scale
    is_allowed = is_key[:, None, :count] & (ids[:, :, None] == ids[:, None, :count])  # [B, T, G]

    def summed(weights):
        values = v[:, :count]
        return jnp.einsum("BTHG,BGHK->BTHK", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)

    return GlobalLogits(is_key, jnp.where(is_allowed[:, :, None], logits, FORBIDDEN), summed)


def window_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    far: Optional[GlobalLogits],
    scale: float,
    drop: Optional[Dropout],
) -> jax.Array:
    """Computes attention of each token to its window and to the global tokens of its segment, [B, T, H, K].

    Args:
      q, k, v: [B, T, H, K].
      mask: a mask with segment ids and a window.
      far: logits and values of the global tokens. If None, tokens attend only to their window.
      scale: the factor of the logits.
      drop: optional dropout for the attention weights.
    """
    b, t, h, d = q.shape
    size = min(mask.reach[0], t)  # block size
    ids = key_ids = mask.query_segment_ids
    if far is not None:  # the window masks global tokens, because they are separate keys (below)
        key_ids = jnp.where(far.is_key, PADDING, ids)
    # [B, T, …] -> [B · N, w, …]; [B, T, …] -> [B · N, 3 w, …]
    queries, keys, values = blocked(q, size), with_neighbours(k, size), with_neighbours(v, size)
    block_mask = Mask(
        query_segment_ids=blocked(ids, size, PADDING),
        key_segment_ids=with_neighbours(key_ids, size, PADDING),
        window=mask.window,
        query_positions=jnp.arange(size) + (keys.shape[1] - size) // 2,
    )
    logits = masked_logits(queries, keys, block_mask, None, scale, None)  # [B · N, H, 1, w, 3 w]
    largest = logits.max(-1)
    if far is not None:
        # [B, T, H, G] -> [B · N, w, H, G] -> [B · N, H, 1, w, G]
        far_logits = blocked(far.logits, size).swapaxes(1, 2)[:, :, None]
        largest = jnp.maximum(largest, far_logits.max(-1))
    largest = jax.lax.stop_gradient(largest)
    weights = jnp.exp(logits - largest[..., None])
    total = weights.sum(-1)
    y = weighted_sum(weights if drop is None else drop(weights), values)

    def to_rows(x):  # [B · N, H, 1, w, …] -> [B · N, w, H, …] -> [B, N · w, H, …] -> [B, T, H, …]
        return heads_last(x).reshape(b, -1, h, x.shape[-1])[:, :t]

    if far is None:
        return to_rows(y / total[..., None]).astype(q.dtype)
    weights = jnp.exp(far_logits - largest[..., None])
    total += weights.sum(-1)
    y = to_rows(y) + far.summed(to_rows(weights if drop is None else drop(weights)))
    return (y / to_rows(total[..., None])).astype(q.dtype)


def first_token_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, scale: float, drop: Optional[Dropout]
) -> jax.Array:
    """Computes attention of the first token of each segment to its segment, [B, T, H, K]; zeros at other tokens.

    Each token is a key for exactly one query: that of its segment's first token. The sum over a segment's tokens is
    stored at the index of the segment's first token.

    NOTE Queries are computed for all tokens, because the number of first tokens is not static. These queries are a
    fifteenth of a block's matmul work.

    Args:
      q, k, v: [B, T, H, K], from the separate projections of global tokens.
      first: [B, T], from `first_tokens`.
    """

    def reduce_segments(reduce, y):
        return jax.vmap(lambda row, segments: reduce(row, segments, row.shape[0]))(y, first)

    logits = jnp.einsum("BTHK,BTHK->BTH", _take_tokens(q, first), k, preferred_element_type=jnp.float32) * scale
    largest = jax.lax.stop_gradient(_take_tokens(reduce_segments(jax.ops.segment_max, logits), first))
    weights = jnp.exp(logits - largest)
    total = reduce_segments(jax.ops.segment_sum, weights)
    weights = weights if drop is None else drop(weights)
    y = reduce_segments(jax.ops.segment_sum, weights[..., None] * v.astype(jnp.float32))
    return (y / jnp.where(total > 0, total, 1.0)[..., None]).astype(v.dtype)


def question_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, count: int, scale: float, drop: Optional[Dropout]
) -> jax.Array:
    """Computes attention for the first `count` tokens, each of which attends to its whole segment, [B, G, H, K].

    Here G = `count`.

    Args:
      q, k, v: [B, T, H, K], from the separate projections of global tokens.
    """
    ids = mask.query_segment_ids
    segment_mask = Mask(False, ids[:, :count], ids)
    return attention(q[:, :count], k, v, weights=Weights(drop), mask=segment_mask, scale=scale)


def blocked(x: jax.Array, size: int, value: int = 0) -> jax.Array:
    """Splits rows into N blocks of `size` tokens, [B, T, …] -> [B · N, w, …]; pads the last block with `value`."""
    return pad(x, 1, size, value).reshape(-1, size, *x.shape[2:])


def with_neighbours(x: jax.Array, size: int, value: int = 0) -> jax.Array:
    """Concatenates each block of `size` tokens with its two neighbours, [B, T, …] -> [B · N, 3 w, …].

    Tokens outside the row are `value`. A row of a single block is returned without neighbours.
    """
    if x.shape[1] <= size:
        return blocked(x, size, value)
    # [B, T, …] -> [B, N, w, …] -> [B, N + 2, w, …] -> [B, N, 3 w, …]
    x = pad(x, 1, size, value).reshape(x.shape[0], -1, size, *x.shape[2:])
    x = jnp.pad(x, ((0, 0), (1, 1), *((0, 0),) * (x.ndim - 2)), constant_values=value)
    x = jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], axis=2)
    return x.reshape(-1, 3 * size, *x.shape[3:])


def _take_tokens(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the tokens of x [B, T, …] at the row indices `index` [B, T]."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)
