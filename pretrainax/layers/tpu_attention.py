"""Pallas attention kernels for TPUs, called through JAX; they never materialize the [B, H, T, S] attention weights.

The kernels are imported on first use.
"""

import functools
import math
from typing import Any, Optional

import jax
import jax.numpy as jnp

from pretrainax.layers.attention_mask import Mask, pad, padded_segments
from pretrainax.layers.attention_spec import AttentionSpec, Work, kernel_obstacle
from pretrainax.layers.attention_work import unskipped_pairs
from pretrainax.layers.rematerialization import saved_residual
from pretrainax.layers.sequence_parallel import on_each_device
from pretrainax.sharding.axes import LENGTH_AXIS
from pretrainax.sharding.mesh import axis_size

LANES = 128  # width of a TPU's vector registers; lengths are padded to multiples of this width


def tile_size(length: int) -> int:
    """Returns the number of queries or keys per tile of a kernel, for a padded length.

    Large tiles fill the matrix unit; a tile of 512 × 512 float32 numbers takes 1 MB of the 16 MB of VMEM.
    """
    return math.gcd(length, 512)


def tpu_splash_obstacle(spec: AttentionSpec, platform: str) -> Optional[str]:
    """Returns why `tpu_splash` cannot compute this attention, phrased as a predicate, or None if it can."""
    obstacle = _common_obstacle(spec, platform)
    if obstacle is None and spec.bias != "none":
        return "takes no bias, and this model has relative positions ('tpu_flash' takes one)"
    return obstacle


def tpu_flash_obstacle(spec: AttentionSpec, platform: str) -> Optional[str]:
    """Returns why `tpu_flash` cannot compute this attention, phrased as a predicate, or None if it can."""
    obstacle = _common_obstacle(spec, platform)
    if obstacle is not None:
        return obstacle
    if spec.window is not None or spec.logit_cap is not None:
        return "has neither windows nor a cap of attention logits ('tpu_splash' has both)"
    if spec.causal and spec.sequence > 1:
        return f"has no causal mask of a part of a row, and config.mesh.{LENGTH_AXIS} is {spec.sequence}"
    return None


def _common_obstacle(spec: AttentionSpec, platform: str) -> Optional[str]:
    """Returns why neither TPU kernel can compute this attention, phrased as a predicate, or None if one might."""
    if platform != "tpu":
        return f"needs a TPU, and this is a {platform.upper()}"
    if obstacle := kernel_obstacle(spec):
        return obstacle
    if spec.head_dim != 64 and spec.head_dim % 128:
        return f"needs config.model.head_dim to be 64 or a multiple of 128, and it is {spec.head_dim}"
    if spec.has_prefix:
        return "has no bidirectional prefix, and config.objective makes one in each row"
    if spec.has_positions:
        return "does not support explicit positions, and this mask has them"
    multiple = spec.sequence * LANES
    if spec.sequence > 1 and any(length % multiple for length in spec.lengths):
        return (
            f"needs lengths that are multiples of {multiple} with config.mesh.{LENGTH_AXIS}={spec.sequence}, and "
            f"they are {spec.query_length} and {spec.key_length} (config.data.sequence_length)"
        )
    return None


def tpu_work(spec: AttentionSpec) -> Work:
    """Returns the `Work` of the flash and the splash attention kernels.

    A kernel computes all query-key pairs in the tiles that it does not skip.

    The backward pass of each kernel runs two kernels: one for the query gradients, and one for the key and value
    gradients. Both recompute the logits, and both compute the gradient of the attention weights.
    """
    queries, keys = (length + -length % LANES for length in (spec.query_length // spec.sequence, spec.key_length))
    return Work(unskipped_pairs(spec, (tile_size(queries), tile_size(keys))), recomputed=3)


@on_each_device
def tpu_splash(q, k, v, mask: Mask, bias, scale, logit_cap):
    """Computes `attention` with JAX's splash attention kernel, which does not support a bias.

    The kernel skips the tiles that a causal mask or a window masks completely.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    assert bias is None and mask.prefix is None and not mask.has_positions
    segments = padded_segments(mask, q, k, LANES)
    # [B, T, H, K] -> [B, H, T', K]; the kernel has no scale, so q is scaled here
    heads_first = [pad(x, 1, LANES).swapaxes(1, 2) for x in (q * jnp.asarray(scale, q.dtype), k, v)]
    # The mask covers whole rows. This device has one shard of the queries of each row, and all keys.
    num_shards = axis_size(LENGTH_AXIS) if mask.causal or mask.window is not None else 1
    block_q, block_kv = (tile_size(x.shape[2]) for x in heads_first[:2])
    shape = num_shards * heads_first[0].shape[2], heads_first[1].shape[2]
    if mask.window is not None:
        head_mask = masks.LocalMask(shape, window_size=mask.reach, offset=0)
    else:
        head_mask = (masks.CausalMask if mask.causal else masks.FullMask)(shape)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([head_mask] * q.shape[2]),
        block_sizes=splash.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
        head_shards=1,
        q_seq_shards=num_shards,
        attn_logits_soft_cap=logit_cap,
    )
    kernel = kernel if num_shards == 1 else _local_kernel(kernel, num_shards)
    out = jax.vmap(kernel)(*heads_first, None if segments is None else splash.SegmentIds(*segments))
    # [B, H, T', K] -> [B, T, H, K]
    return out.swapaxes(1, 2)[:, : q.shape[1]]


def _local_kernel(kernel: Any, num_shards: int) -> Any:
    """Returns a splash attention kernel for the queries of this device, with the device's shard of the mask.

    The index of the device on the axis `sequence` selects the blocks of the mask.
    SplashAttentionKernel.manual_sharding_spec splits the mask in the same way.

    Args:
      kernel: the kernel for whole rows.
      num_shards: number of shards of a row.
    """

    def slice_array(x, axis):
        if x is None:
            return None
        size = x.shape[axis] // num_shards
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(LENGTH_AXIS) * size, size, axis)

    def slice_info(info):
        block_arrays = {name: slice_array(getattr(info, name), 1) for name in ("data_next", "mask_next", "block_mask")}
        return info._replace(**block_arrays, q_sequence=slice_array(info.q_sequence, 0))

    infos = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
    return type(kernel)(*map(slice_info, infos), **kernel.kwargs)


@on_each_device
def tpu_flash(q, k, v, mask: Mask, bias, scale, logit_cap):
    """Computes `attention` with JAX's flash attention kernel, which supports a bias but no windows or logit cap."""
    assert mask.window is None and mask.prefix is None and not mask.has_positions and logit_cap is None
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    segments = padded_segments(mask, q, k, LANES)
    repeats = q.shape[2] // k.shape[2]
    # [B, T, H, K] -> [B, H, T', K]; the kernel would scale the bias too, so q is scaled here
    heads_first = [
        pad(x, 1, LANES).swapaxes(1, 2)
        for x in (q * jnp.asarray(scale, q.dtype), jnp.repeat(k, repeats, 2), jnp.repeat(v, repeats, 2))
    ]
    if bias is not None:
        # [1 or B, H, T, S] -> [1 or B, H, T', S']
        bias = pad(pad(bias.astype(q.dtype), 2, LANES), 3, LANES)
    block_q, block_kv = (tile_size(x.shape[2]) for x in heads_first[:2])
    flash_attention = functools.partial(
        flash.flash_attention,
        causal=mask.causal,
        block_sizes=flash.BlockSizes(
            block_q=block_q,
            block_k_major=block_kv,
            block_k=block_kv,
            block_b=1,
            block_q_major_dkv=block_q,
            block_k_major_dkv=block_kv,
            block_k_dkv=block_kv,
            block_q_dkv=block_q,
            block_k_major_dq=block_kv,
            block_k_dq=block_kv,
            block_q_dq=block_q,
        ),
    )

    def attend_row(q, k, v, bias, segments):
        segments = None if segments is None else flash.SegmentIds(*(x[None] for x in segments))
        return flash_attention(q[None], k[None], v[None], None if bias is None else bias[None], segments)[0]

    # The kernel is applied row by row, because it expects the bias as [B, H, T, S]. A bias that all rows share thus
    # stays [1, H, T, S] in memory.
    is_shared = bias is not None and bias.shape[0] == 1
    bias = bias if bias is None or is_shared else saved_residual(bias)
    bias_axis = None if is_shared else 0
    out = jax.vmap(attend_row, in_axes=(0, 0, 0, bias_axis, 0))(*heads_first, bias[0] if is_shared else bias, segments)
    # [B, H, T', K] -> [B, T, H, K]
    return out.swapaxes(1, 2)[:, : q.shape[1]]
