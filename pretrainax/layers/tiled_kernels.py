"""Pallas kernels of `tiled` attention: the forward, and the gradients of queries, of keys and values, and of the bias.

The forward and the backward follow FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithms 1 and 2). A program of a
kernel computes one tile of its result and loops over the tiles of the other axis. The loop covers the tiles that the
mask allows (`tile_ranges`). The backward recomputes the logits and draws the dropout of the weights again.

Lengths in this file are padded to multiples of the tiles, head sizes to powers of two.
"""

import functools
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pretrainax.layers.attention_mask import FORBIDDEN
from pretrainax.layers.dropout import threshold
from pretrainax.layers.hashed_keys import hashed_bits
from pretrainax.layers.tiled_layout import Operand, call
from pretrainax.sharding.mesh import platform


class Settings(NamedTuple):
    """The static properties of an attention call."""

    scale: float
    logit_cap: Optional[float]
    causal: bool
    reach: Optional[tuple[int, int]]  # the window, as in `Mask.reach`; None: no window
    dropout_rate: float
    lengths: tuple[int, int]  # numbers of queries and keys before padding
    tiles: tuple[int, int]  # queries and keys per tile


class Operands(NamedTuple):
    """The arrays that the kernels read; None for a feature that the attention does not use.

    `Operand` is indexed as [rows, heads, tokens, features], whatever the layout of its array is.
    """

    q: Operand  # [B, H, T, K]
    k: Operand  # [B, G, S, K]
    v: Operand  # [B, G, S, V]
    bias: Optional[jax.Array]  # [1 or B, H, T, S]
    query_ids: Optional[jax.Array]  # [B, T, 1] int32, segment ids
    key_ids: Optional[jax.Array]  # [B, 1, S] int32
    prefix: Optional[jax.Array]  # [B, 1, S] int32
    # [1 or B, T / tile] int32 each, the first tile of keys and the last + 1 of each tile of queries
    key_ranges: tuple[jax.Array, jax.Array]
    query_ranges: tuple[jax.Array, jax.Array]  # [1 or B, S / tile] int32 each, the tiles of queries of a tile of keys
    sinks: Optional[jax.Array]  # [H] float32
    seeds: Optional[jax.Array]  # [B, H] uint32, the part of the dropout's hash that depends on the row and the head
    word: Optional[jax.Array]  # [1] uint32, the first word of the dropout's key


class Residuals(NamedTuple):
    """The arrays of the backward kernels in addition to `Operands`."""

    d_out: Operand  # [B, H, T, V]
    normalizer: jax.Array  # [B, H, T, 1] float32, log of the sum of exp(logit)
    delta: Optional[jax.Array] = None  # [B, H, T, 1] float32, out · d_out; computed by `query_gradients`


class _Place(NamedTuple):
    """The tile of logits that a program computes: row, query head, key head, query tile and key tile."""

    row: jax.Array
    head: jax.Array
    key_head: jax.Array
    queries: jax.Array
    keys: jax.Array


def forward(settings: Settings, x: Operands) -> tuple[Operand, jax.Array]:
    """Computes the output [B, H, T, V] in q's dtype and the normalizers [B, H, T, 1] float32."""
    b, h, t, _ = x.q.shape
    out = jax.tree.map(lambda q, v: jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype), x.q, x.v)
    shapes = out, jax.ShapeDtypeStruct((b, h, t, 1), jnp.float32)
    grid = {"tile": t // settings.tiles[0], "head": h, "row": b}
    return _call(_forward_tile, "tiled_attention", settings, grid, shapes, x)


def query_gradients(
    settings: Settings, x: Operands, out: Operand, residuals: Residuals
) -> tuple[Operand, jax.Array, Optional[jax.Array]]:
    """Computes the gradient of q, delta [B, H, T, 1] and, if the bias differs between rows, the gradient of the bias.

    Args:
      out: [B, H, T, V], the output of `forward`.
      residuals: without `delta`.
    """
    b, h, t, _ = x.q.shape
    row_bias = () if x.bias is None or shares_bias(x) else (x.bias,)
    grid = {"tile": t // settings.tiles[0], "head": h, "row": b}
    shapes = _shapes((x.q, residuals.normalizer, *row_bias))
    results = _call(_query_tile, "tiled_attention_query_gradient", settings, grid, shapes, x, out, residuals)
    return (*results, None)[:3]


def key_value_gradients(settings: Settings, x: Operands, residuals: Residuals) -> tuple[Operand, Operand]:
    """Computes the gradients of k [B, G, S, K] and v [B, G, S, V].

    A program of a GPU adds up the query heads that share a key head. A TPU runs its programs in order and has one query
    head at a time; they add their tiles to the result.
    """
    (b, g, s, _), heads = x.k.shape, x.q.shape[1]
    shapes = _shapes((x.k, x.v))
    tiles = s // settings.tiles[1]
    if platform() != "tpu":
        grid = {"tile": tiles, "key head": g, "row": b}
        return _call(_key_value_tile, "tiled_attention_key_gradient", settings, grid, shapes, x, residuals)
    sums = jax.tree.map(lambda shape: shape.update(dtype=jnp.float32), shapes)
    grid = {"tile": tiles, "head": heads, "row": b}
    sums = _call(_key_value_tile, "tiled_attention_key_gradient", settings, grid, sums, x, residuals)
    return jax.tree.map(lambda total, shape: total.astype(shape.dtype), sums, shapes)


def shared_bias_gradient(settings: Settings, x: Operands, residuals: Residuals) -> jax.Array:
    """Computes the gradient of a bias [1, H, T, S] that all rows share, without an array [B, H, T, S].

    A program of a GPU adds up one tile of all rows. A TPU runs its programs in order and has one row at a time; they
    add their tiles to the result.
    """
    assert x.bias is not None
    (b, h, t, _), s = x.q.shape, x.k.shape[2]
    shape = jax.ShapeDtypeStruct(x.bias.shape, jnp.float32)
    queries, keys = t // settings.tiles[0], s // settings.tiles[1]
    on_tpu = platform() == "tpu"
    grid = {"keys": keys, "tile": queries} | ({"row": b} if on_tpu else {}) | {"head": h}
    d_bias = _call(_bias_tile, "tiled_attention_bias_gradient", settings, grid, shape, x, residuals)
    return d_bias.astype(x.bias.dtype)


def shares_bias(x: Operands) -> bool:
    """Returns True if all rows share the bias, which must exist."""
    assert x.bias is not None
    return x.bias.shape[0] == 1


def _call(kernel, name: str, settings: Settings, grid: dict[str, int], shapes, *args):
    return call(functools.partial(kernel, settings), name, grid, shapes, args, max(settings.tiles) > 64)


def _shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


# --- kernels: the arguments are the settings, the program's index and references to arrays --------------------------


def _forward_tile(settings: Settings, program, x, out, normalizer):
    """Computes the output of one tile of queries."""
    tile, head, row = program["tile"], program["head"], program["row"]
    at = _Place(row, head, _key_head(x, head), tile, tile)
    q = x.q[row, head, _rows(settings, tile), :]

    def attend(j, carry):
        largest, total, acc = carry
        place = at._replace(keys=j)
        k, v = (array[row, at.key_head, _columns(settings, j), :] for array in (x.k, x.v))
        logits, _, allowed = _logits(settings, x, place, q, k)
        new_largest = jnp.maximum(largest, _masked(allowed, logits, FORBIDDEN).max(1, keepdims=True))
        weights = _masked(allowed, jnp.exp(logits - new_largest), 0.0)
        rescale = jnp.exp(largest - new_largest)
        total = total * rescale + weights.sum(1, keepdims=True)
        return new_largest, total, acc * rescale + _dot(_drop(settings, x, place, weights).astype(v.dtype), v, 1, 0)

    column = jnp.zeros((settings.tiles[0], 1), jnp.float32)
    sink = FORBIDDEN if x.sinks is None else x.sinks[head]
    start = column + sink, column + (0.0 if x.sinks is None else 1.0), jnp.zeros((settings.tiles[0], out.shape[3]))
    first, end = _range(x.key_ranges, row, tile)
    largest, total, acc = jax.lax.fori_loop(first, end, attend, start)
    # A query without an allowed key has the output 0.
    total = jnp.where(total > 0, total, 1.0)
    out[row, head, _rows(settings, tile), :] = (acc / total).astype(out.dtype)
    normalizer[row, head, _rows(settings, tile), :] = largest + jnp.log(total)


def _query_tile(settings: Settings, program, x, out, residuals, d_q, delta, d_bias=None):
    """Computes the gradient and delta of one tile of queries, and the gradient of their biases."""
    tile, head, row = program["tile"], program["head"], program["row"]
    queries, at = _rows(settings, tile), _Place(row, head, _key_head(x, head), tile, tile)
    q, gradient = x.q[row, head, queries, :], residuals.d_out[row, head, queries, :]
    product = out[row, head, queries, :].astype(jnp.float32) * gradient.astype(jnp.float32)
    totals = residuals.normalizer[row, head, queries, :], product.sum(1, keepdims=True)
    delta[row, head, queries, :] = totals[1]

    def attend(j, total):
        keys = _columns(settings, j)
        k, v = (array[row, at.key_head, keys, :] for array in (x.k, x.v))
        _, d_logits, slope = _gradients(settings, x, at._replace(keys=j), (q, k, v, gradient), totals)
        if d_bias is not None:
            d_bias[row, head, queries, keys] = d_logits.astype(d_bias.dtype)
        return total + _dot((d_logits * slope).astype(k.dtype), k, 1, 0)

    first, end = _range(x.key_ranges, row, tile)
    total = jax.lax.fori_loop(first, end, attend, jnp.zeros(q.shape, jnp.float32))
    d_q[row, head, queries, :] = (total * settings.scale).astype(d_q.dtype)
    if d_bias is None:
        return

    def clear(j, _):
        d_bias[row, head, queries, _columns(settings, j)] = jnp.zeros(settings.tiles, d_bias.dtype)

    jax.lax.fori_loop(0, first, clear, None)
    jax.lax.fori_loop(end, d_bias.shape[3] // settings.tiles[1], clear, None)


def _key_value_tile(settings: Settings, program, x, residuals, d_k, d_v):
    """Computes the gradients of one tile of keys and values, summed over the query heads that share them."""
    tile, row, repeats = program["tile"], program["row"], x.q.shape[1] // x.k.shape[1]
    key_head = program["key head"] if "key head" in program else program["head"] // repeats
    index = row, key_head, _columns(settings, tile), slice(None)
    k, v = x.k[index], x.v[index]
    first, end = _range(x.query_ranges, row, tile)

    def add_head(head, total):
        def add(i, total):
            place = _Place(row, head, key_head, i, tile)
            q, gradient, *totals = _query_inputs(settings, x, residuals, place)
            weights, d_logits, slope = _gradients(settings, x, place, (q, k, v, gradient), totals)
            total_k = total[0] + _dot((d_logits * slope).astype(q.dtype), q, 0, 0)
            return total_k, total[1] + _dot(weights.astype(v.dtype), gradient, 0, 0)

        return jax.lax.fori_loop(first, end, add, total)

    total = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    if "key head" in program:
        total = jax.lax.fori_loop(key_head * repeats, (key_head + 1) * repeats, add_head, total)
    else:
        total = add_head(program["head"], total)
    total_k, total_v = total[0] * settings.scale, total[1]
    if "head" in program:
        is_first = program["head"] % repeats == 0
        total_k += jnp.where(is_first, 0.0, d_k[index])
        total_v += jnp.where(is_first, 0.0, d_v[index])
    d_k[index], d_v[index] = total_k.astype(d_k.dtype), total_v.astype(d_v.dtype)


def _bias_tile(settings: Settings, program, x, residuals, d_bias):
    """Computes one tile of the gradient of a shared bias, summed over the rows."""
    i, j, head = program["tile"], program["keys"], program["head"]
    at = _Place(0, head, _key_head(x, head), i, j)
    tile = 0, head, _rows(settings, i), _columns(settings, j)

    def add_row(row, total):
        place = at._replace(row=row)

        def add(total):
            q, gradient, *totals = _query_inputs(settings, x, residuals, place)
            k, v = (array[row, at.key_head, _columns(settings, j), :] for array in (x.k, x.v))
            return total + _gradients(settings, x, place, (q, k, v, gradient), totals)[1]

        first, end = _range(x.key_ranges, row, i)
        return jax.lax.cond((first <= j) & (j < end), add, lambda total: total, total)

    zeros = jnp.zeros(settings.tiles, jnp.float32)
    if "row" in program:
        d_bias[tile] = add_row(program["row"], jnp.where(program["row"] == 0, zeros, d_bias[tile]))
    else:
        d_bias[tile] = jax.lax.fori_loop(0, x.q.shape[0], add_row, zeros)


# --- one tile of logits ----------------------------------------------------------------------------------------------


def _query_inputs(settings: Settings, x, residuals, place: _Place):
    """Loads a tile of queries, and the gradients, normalizers and deltas of their outputs."""
    row, queries, head = place.row, _rows(settings, place.queries), place.head
    q, gradient = x.q[row, head, queries, :], residuals.d_out[row, head, queries, :]
    return q, gradient, residuals.normalizer[row, head, queries, :], residuals.delta[row, head, queries, :]


def _gradients(settings: Settings, x, place: _Place, arrays, totals):
    """Computes the weights after dropout, the gradients of the logits, and the slope of the logit cap, [t, s] each.

    The gradient of a logit is p · (dp - delta), where p is its weight and dp the gradient of the weight (Dao et al.
    2022, arXiv 2205.14135, section B.4).

    Args:
      arrays: tiles of q, k, v and the gradient of the output, [t or s, K or V] each.
      totals: the normalizers and deltas of the queries, [t, 1] each.
    """
    q, k, v, gradient = arrays
    normalizers, deltas = totals
    logits, slope, allowed = _logits(settings, x, place, q, k)
    weights = _masked(allowed, jnp.exp(logits - normalizers), 0.0)
    d_weights = _drop(settings, x, place, _dot(gradient, v, 1, 1))
    return _drop(settings, x, place, weights), weights * (d_weights - deltas), slope


def _logits(settings: Settings, x, place: _Place, q, k):
    """Computes a tile of logits [t, s] float32, the slope of the logit cap, and the mask, None if all are allowed."""
    logits, slope = _dot(q, k, 1, 1) * settings.scale, 1.0
    if settings.logit_cap is not None:
        tanh = jnp.tanh(logits / settings.logit_cap)
        logits, slope = settings.logit_cap * tanh, 1.0 - tanh * tanh
    if x.bias is not None:
        row = 0 if shares_bias(x) else place.row
        bias = x.bias[row, place.head, _rows(settings, place.queries), _columns(settings, place.keys)]
        logits += bias.astype(jnp.float32)
    return logits, slope, _allowed(settings, x, place)


def _allowed(settings: Settings, x, place: _Place):
    """Computes the mask of a tile, [t, s] bool, as `Mask.materialize` does; None if no pair is masked."""
    queries, keys = _indices(settings, place)
    parts = []
    if settings.causal:
        allowed = keys <= queries
        if x.prefix is not None:
            allowed |= x.prefix[place.row, :, _columns(settings, place.keys)] > 0
        parts.append(allowed)
    if settings.reach is not None:
        before, after = settings.reach
        parts.append((queries - before <= keys) & (keys <= queries + after))
    if x.query_ids is not None:
        query_ids = x.query_ids[place.row, _rows(settings, place.queries), :]
        parts.append(query_ids == x.key_ids[place.row, :, _columns(settings, place.keys)])
    elif x.k.shape[2] > settings.lengths[1]:
        parts.append(keys < settings.lengths[1])
    return functools.reduce(jnp.logical_and, parts) if parts else None


def _masked(allowed, x, value: float):
    return x if allowed is None else jnp.where(allowed, x, value)


def _drop(settings: Settings, x, place: _Place, weights):
    """Applies the dropout of the attention weights to a tile [t, s], as `apply_dropout` does to all weights."""
    if not settings.dropout_rate:
        return weights
    queries, keys = (indices.astype(jnp.uint32) for indices in _indices(settings, place))
    index = queries * np.uint32(settings.lengths[1]) + keys
    bits = hashed_bits(x.word[0], index, x.seeds[place.row, place.head])
    return jnp.where(bits >= threshold(settings.dropout_rate), weights * (1.0 / (1.0 - settings.dropout_rate)), 0.0)


def _indices(settings: Settings, place: _Place):
    """Returns the indices of the queries and keys of a tile in their row, [t, s] int32 each."""
    tiles = settings.tiles
    queries = place.queries * tiles[0] + jax.lax.broadcasted_iota(jnp.int32, tiles, 0)
    return queries, place.keys * tiles[1] + jax.lax.broadcasted_iota(jnp.int32, tiles, 1)


def _rows(settings: Settings, tile):
    return _slice(tile, settings.tiles[0])


def _columns(settings: Settings, tile):
    return _slice(tile, settings.tiles[1])


def _slice(tile, size: int):
    return pl.ds(pl.multiple_of(tile * size, size), size)


def _range(ranges, row, tile):
    """Returns the first tile and the last tile + 1 to which the mask restricts a loop."""
    first, end = ranges
    row = 0 if first.shape[0] == 1 else row
    return first[row, tile], end[row, tile]


def _key_head(x, head):
    return head // (x.q.shape[1] // x.k.shape[1])


def _dot(a, b, a_axis: int, b_axis: int):
    """Multiplies two matrices over the given axes, with a float32 sum."""
    return jax.lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)
