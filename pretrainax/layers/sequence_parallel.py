"""Attention with a sharded sequence dimension: each device has T/n queries and S/n keys of each row.

n is the size of the mesh axis `sequence`.

In ring attention (Liu et al. 2023, arXiv 2310.01889, section 3), the keys and values of each device travel around the
ring of n devices. Each device attends to the keys and values that it currently holds and accumulates the softmax step
by step. A device never holds more than two shards of k and v and the logits of one shard, so ring attention supports
long contexts. It is written in JAX and supports every mask, bias and logit cap.

A kernel that requires all keys of a row gets them by an all-gather instead, as in Llama 3 (arXiv 2407.21783, section
3.3.2). With few key heads, keys and values are small compared with the queries (`on_each_device`).

NOTE Each shard is a contiguous range of the row. With a causal mask, the first device has less work than the last
device and waits for it. For a long row, the waiting takes half of the time. Token orders that balance the work (Brandon
et al. 2023, "striped") are not implemented.
"""

import functools
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.layers.attention_mask import Mask, heads_last, masked_logits, pad, padded_segments, weighted_sum
from pretrainax.layers.rematerialization import saved_residual
from pretrainax.sharding.axes import BATCH_AXES, LENGTH_AXIS, TENSOR_AXIS
from pretrainax.sharding.mesh import axis_size, free_axes


class _Settings(NamedTuple):
    """The static arguments of ring attention."""

    scale: float
    logit_cap: Optional[float]
    num_shards: int


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    bias: Optional[jax.Array],
    scale: float,
    logit_cap: Optional[float],
) -> jax.Array:
    """Computes `attention` as ring attention under the current mesh (`jax.set_mesh`).

    The arguments and the result are as in `attention`: global arrays, not the shards of one device. Lengths that are
    not multiples of the number of devices in the ring are padded.
    """
    assert not mask.has_positions  # each device computes the indices of its own shard
    num_shards = axis_size(LENGTH_AXIS)
    length, segments = q.shape[1], padded_segments(mask, q, k, num_shards)
    if segments is not None:
        mask = mask.replace(query_segment_ids=segments[0], key_segment_ids=segments[1])
        mask = mask if mask.prefix is None else mask.replace(prefix=pad(mask.prefix, 1, num_shards))
        q, k, v = (pad(x, 1, num_shards) for x in (q, k, v))
        bias = None if bias is None else pad(pad(bias, 2, num_shards), 3, num_shards)
    array, per_token = P(_row_axes(q), LENGTH_AXIS, _head_axis(k)), P(_row_axes(q), LENGTH_AXIS)  # [B, T, H, K], [B, T]
    run_ring = jax.shard_map(
        functools.partial(_ring, _Settings(scale, logit_cap, num_shards)),
        in_specs=(array, array, array, _bias_spec(bias, q, k), _mask_spec(mask, per_token, per_token)),
        out_specs=array,
        check_vma=False,  # a device cannot declare that data from a neighbouring device varies along the axis
    )
    return run_ring(q, k, v, bias, mask)[:, :length]


def _row_axes(q: jax.Array) -> Optional[tuple[str, ...]]:
    """Returns the mesh axes that shard the rows, or None if their size does not divide the number of rows.

    In the latter case, each device has all rows.
    """
    axes = free_axes(BATCH_AXES)
    return axes if axes and q.shape[0] % axis_size(axes) == 0 else None


def _head_axis(k: jax.Array) -> Optional[str]:
    """Returns the mesh axis that shards the heads, or None if its size does not divide the number of key heads."""
    return TENSOR_AXIS if k.shape[2] % axis_size(TENSOR_AXIS) == 0 else None


def _bias_spec(bias: Optional[jax.Array], q: jax.Array, k: jax.Array) -> Optional[P]:
    return None if bias is None else P(_row_axes(q) if bias.shape[0] > 1 else None, _head_axis(k), LENGTH_AXIS)


def _mask_spec(mask: Mask, query: P, key: P) -> Mask:
    """Returns a `Mask` that holds the partition spec of each array of `mask`, or None where `mask` has no array."""
    specs = Mask(mask.causal, query, key, mask.window, P(), key, single_segment=mask.single_segment)
    return jax.tree.map(
        lambda spec, x: None if x is None else spec, specs, mask, is_leaf=lambda x: x is None or isinstance(x, P)
    )


# --- the ring, on one device ------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(settings: _Settings, q, k, v, bias, mask):
    return _ring_forward(settings, q, k, v, bias, mask)[0]


def _ring_forward(settings: _Settings, q, k, v, bias, mask):
    """Returns the output [B, T/n, H, K] of this device, and the residuals for the backward."""
    b, t, h, d = q.shape
    g = k.shape[2]
    initial = (
        jnp.full((b, g, h // g, t), -jnp.inf),  # the largest logit so far
        jnp.zeros((b, g, h // g, t)),  # the sum of exp(logit - largest)
        jnp.zeros((b, g, h // g, t, d)),  # the sum of exp(logit - largest) · value
    )

    def attend(carry, kv_block, step):
        largest, normaliser, total = carry
        logits = _logits(settings, q, kv_block, _bias_columns(settings, bias, step), mask, step)
        new_largest = jnp.maximum(largest, logits.max(-1))
        weights, rescale = jnp.exp(logits - new_largest[..., None]), jnp.exp(largest - new_largest)
        total = total * rescale[..., None] + weighted_sum(weights, kv_block["v"])
        return new_largest, normaliser * rescale + weights.sum(-1), total

    largest, normaliser, total = _scan_ring(settings, attend, initial, _kv_block(k, v, mask))
    largest, normaliser, total = (
        saved_residual(largest),
        saved_residual(normaliser),
        saved_residual(total / normaliser[..., None]),
    )
    out = heads_last(total).astype(q.dtype)
    return out, (q, k, v, bias, mask, total, largest, normaliser)


def _ring_backward(settings: _Settings, residuals, gradient):
    """Computes the gradients of q, k, v and the bias, sending k, v and their gradients around the ring once more.

    The gradient of a logit is p · (dp - D), where p is the attention weight of the logit, dp = value · d_out and D =
    out · d_out (Dao et al. 2022, arXiv 2205.14135, section B.4). The gradients of attention are therefore the gradients
    of sum(p · (dp - D)), with the largest logits, the normalisers and D held constant. This is true for any function
    that computes a logit from q, k and the bias.
    """
    q, k, v, bias, mask, out, largest, normaliser = residuals
    b, g, r, t, d = out.shape
    # [B, T, H, K] -> [B, G, R, T, K]
    d_out = gradient.astype(jnp.float32).reshape(b, t, g, r, d).transpose(0, 2, 3, 1, 4)
    out_dot_d_out = (out * d_out).sum(-1)  # D

    def objective(q, k, v, columns, kv_block, step):
        logits = _logits(settings, q, kv_block | {"k": k}, columns, mask, step)
        weights = jnp.exp(logits - largest[..., None]) / normaliser[..., None]
        d_weights = jnp.einsum("BGRTK,BSGK->BGRTS", d_out.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return jnp.sum(weights * (d_weights - out_dot_d_out[..., None]))

    def attend(carry, kv_block, step):
        d_q, d_bias, d_kv = carry
        columns = _bias_columns(settings, bias, step)
        arrays = q, kv_block["k"], kv_block["v"], columns
        new_q, new_k, new_v, new_columns = jax.grad(objective, (0, 1, 2, 3))(*arrays, kv_block, step)
        if bias is not None:
            start = _source_device(settings, step) * columns.shape[3]
            d_bias = jax.lax.dynamic_update_slice_in_dim(d_bias, new_columns, start, axis=3)
        # The gradients of k and v travel to the next device together with k and v, in float32.
        d_kv = jax.tree.map(lambda x, new: x + new.astype(jnp.float32), d_kv, (new_k, new_v))
        return d_q + new_q.astype(jnp.float32), d_bias, _send_to_next(settings, d_kv)

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
    start = zeros[0], None if bias is None else jnp.zeros_like(bias), tuple(zeros[1:])
    d_q, d_bias, (d_k, d_v) = _scan_ring(settings, attend, start, _kv_block(k, v, mask))
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_bias, None


_ring.defvjp(_ring_forward, _ring_backward)


def _kv_block(k, v, mask: Mask) -> dict[str, Optional[jax.Array]]:
    """Collects the arrays that travel around the ring: keys and values with their segment ids and prefix."""
    return {"k": k, "v": v, "ids": mask.key_segment_ids, "prefix": mask.prefix}


def _scan_ring(settings: _Settings, attend, carry, kv_block):
    """Calls `attend(carry, kv_block, step)` for each shard of the keys, and returns the final carry.

    Step 0 processes the device's own shard. The transfer of the next shard overlaps with the computation.
    """

    def body(state, step):
        carry, kv_block = state
        return (attend(carry, kv_block, step), _send_to_next(settings, kv_block)), None

    (carry, kv_block), _ = jax.lax.scan(body, (carry, kv_block), jnp.arange(settings.num_shards - 1))
    return attend(carry, kv_block, settings.num_shards - 1)


def _send_to_next(settings: _Settings, tree):
    """Sends a tree of arrays to the next device of the ring, and returns the tree from the previous device."""
    pairs = [(i, (i + 1) % settings.num_shards) for i in range(settings.num_shards)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, LENGTH_AXIS, pairs), tree)


def _source_device(settings: _Settings, step):
    """Returns the index, along the mesh axis, of the device whose keys this device holds at a given step."""
    return (jax.lax.axis_index(LENGTH_AXIS) - step) % settings.num_shards


def _bias_columns(settings: _Settings, bias, step):
    """Slices the bias for the current keys: [1 or B, H, T/n, S] -> [1 or B, H, T/n, S/n].

    Returns None if there is no bias.
    """
    if bias is None:
        return None
    size = bias.shape[3] // settings.num_shards
    return jax.lax.dynamic_slice_in_dim(bias, _source_device(settings, step) * size, size, axis=3)


def _logits(settings: _Settings, q, kv_block, columns, mask: Mask, step):
    """Computes the logits of this device's queries with the current keys, [B, G, R, T/n, S/n] float32."""
    t, s = q.shape[1], kv_block["k"].shape[1]
    mask = mask.replace(
        key_segment_ids=kv_block["ids"],
        prefix=kv_block["prefix"],
        query_positions=jax.lax.axis_index(LENGTH_AXIS) * t + jnp.arange(t),
        key_positions=_source_device(settings, step) * s + jnp.arange(s),
    )
    return masked_logits(q, kv_block["k"], mask, columns, settings.scale, settings.logit_cap)


# --- kernels --------------------------------------------------------------------------------------------------------


def on_each_device(kernel):
    """Wraps `kernel` to run on each device, with the rows, heads and queries of that device.

    This is for kernels that the compiler cannot partition. The wrapped function runs under the current mesh
    (`jax.set_mesh`). It all-gathers keys and values along the sequence dimension; the backward reduce-scatters their
    gradients. Further arguments are trees of arrays [B, H], [H] or [1].
    """

    @functools.wraps(kernel)
    def sharded(q, k, v, mask: Mask, bias, scale, logit_cap, *others):
        if jax.sharding.get_abstract_mesh().size in (0, 1):  # no mesh, or a single device
            return kernel(q, k, v, mask, bias, scale, logit_cap, *others)

        def run_local(q, k, v, mask, bias, *others):
            if axis_size(LENGTH_AXIS) > 1:
                k, v = (jax.lax.all_gather(x, LENGTH_AXIS, axis=1, tiled=True) for x in (k, v))
            return kernel(q, k, v, mask, bias, scale, logit_cap, *others)

        def spec_of_other(x):
            by_head = P(_head_axis(k)) if x.shape == q.shape[2:3] else P()
            return P(_row_axes(q), _head_axis(k)) if x.ndim == 2 else by_head

        array = P(_row_axes(q), LENGTH_AXIS, _head_axis(k))  # [B, T, H, K]
        mask_spec = _mask_spec(mask, P(_row_axes(q), LENGTH_AXIS), P(_row_axes(q)))
        run_sharded = jax.shard_map(
            run_local,
            in_specs=(array, array, array, mask_spec, _bias_spec(bias, q, k), *jax.tree.map(spec_of_other, others)),
            out_specs=array,
            check_vma=False,  # the kernels do not declare which axes their results vary over
        )
        return run_sharded(q, k, v, mask, bias, *others)

    return sharded
