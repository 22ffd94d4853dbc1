"""Scaled dot-product attention behind one function, with the backends of each kind of hardware.

`xla` is the reference and runs everywhere; `cudnn` (GPU), `tpu_flash` and `tpu_splash` (TPU) never hold the
[B, H, T, S] weights. A mask is a description (`Mask`), made into an array only in a backend that needs one. Where the
mesh splits the length, `xla` is ring attention and the kernels of TPUs gather keys and values.
"""

import functools
from typing import Any, Optional

import jax
import jax.numpy as jnp

from pretrainax.config import UserError
from pretrainax.layers.attention_mask import Mask, heads_last, masked_logits, weighted_sum
from pretrainax.layers.sequence_parallel import ring_attention
from pretrainax.layers.tpu_attention import LANES, tpu_flash, tpu_splash
from pretrainax.sharding.axes import LENGTH_AXIS
from pretrainax.sharding.mesh import axis_size


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    bias: Optional[jax.Array] = None,
    scale: float,
    logit_cap: Optional[float] = None,
    implementation: str = "xla",
) -> jax.Array:
    """softmax(scale · q kᵀ + bias) v (Vaswani et al. 2017, section 3.2.1), the softmax in float32.

    Args:
      q: [B, T, H, K]; k, v: [B, S, G, K]. Query heads [i·H/G, (i+1)·H/G) share key head i (Ainslie et al. 2023).
      mask: which keys each query may see. A query that may see none gives a finite value without a meaning.
      bias: [1 or B, H, T, S], added to the scaled logits; gradients flow to it.
      scale: 1/sqrt(K) for most models, 1 for T5.
      logit_cap: scaled logits x become cap · tanh(x / cap) (Gemma 2, arXiv 2408.00118, section 2).
      implementation: a name that `choose_implementation` returned.

    Returns:
      [B, T, H, K] in q's dtype.
    """
    run = functools.partial(_IMPLEMENTATIONS[implementation], bias=bias, scale=scale, logit_cap=logit_cap)
    if mask.windowed is None or implementation == "xla":
        return run(q, k, v, mask)
    # A fused kernel is made for one mask: there are two, and a layer runs one of them.
    near, everywhere = mask.replace(windowed=None), mask.replace(windowed=None, window=None)
    return jax.lax.cond(mask.windowed, lambda *x: run(*x, near), lambda *x: run(*x, everywhere), q, k, v)


def choose_implementation(
    requested: str,
    platform: str,
    *,
    head_dim: int,
    query_length: int,
    key_length: int,
    has_bias: bool,
    has_row_bias: bool = False,
    has_window: bool = False,
    has_logit_cap: bool = False,
    has_prefix: bool = False,
    causal: bool = True,
    sequence: int = 1,
    dtype: Any,
) -> tuple[str, Optional[str]]:
    """The implementation for `config.train.attention = requested`, and a warning where a faster one was left out.

    Args:
      requested: a name, or "auto": the fastest that fits.
      platform: `sharding.platform()`.
      has_row_bias: the bias is another one for each row, not one for all.
      has_prefix: a part of each segment is seen by the whole segment, though the mask is causal.
      sequence: parts that the mesh cuts the length into.
      dtype: of q, k and v.

    Raises:
      UserError: the requested one cannot run here.
    """
    shapes = {"head_dim": head_dim, "lengths": (query_length, key_length), "has_bias": has_bias}
    shapes |= {"has_row_bias": has_row_bias, "has_window": has_window, "has_logit_cap": has_logit_cap}
    shapes |= dict(has_prefix=has_prefix, causal=causal, sequence=sequence)
    if requested != "auto":
        obstacle = _obstacle(requested, platform, dtype=dtype, **shapes)
        if obstacle:
            raise UserError(
                f"config.train.attention is {requested!r}, which {obstacle}; set it to 'auto', or to 'xla', which "
                "always runs"
            )
        return requested, None
    if platform in ("gpu", "cuda"):
        best = "cudnn"
    elif platform == "tpu" and max(query_length, key_length) >= LANES:  # shorter ones have nothing to gain
        best = "tpu_flash" if has_bias else "tpu_splash"
    else:
        return "xla", None
    obstacle = _obstacle(best, platform, dtype=dtype, **shapes)
    if obstacle:
        return "xla", f"SLOW ATTENTION: 'xla' is used on this {platform.upper()}, because {best!r} {obstacle}"
    return best, None


def _obstacle(
    name: str,
    platform: str,
    *,
    head_dim,
    lengths,
    has_bias,
    has_row_bias,
    has_window,
    has_logit_cap,
    has_prefix,
    causal,
    sequence,
    dtype,
) -> Optional[str]:
    """Why an implementation cannot run, as the end of a sentence that begins with its name; None if it can."""
    if name not in _IMPLEMENTATIONS:
        return f"is unknown (allowed: auto, {', '.join(_IMPLEMENTATIONS)})"
    if name == "cudnn":
        if platform not in ("gpu", "cuda"):
            return f"needs an NVIDIA GPU, and this is a {platform.upper()}"
        if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
            return f"needs config.train.dtype 'bfloat16' and got {jnp.dtype(dtype).name!r}"
        if head_dim % 8 or head_dim > 128:
            return f"needs config.model.head_dim to be a multiple of 8 and at most 128, and it is {head_dim}"
        if any(length % 2 for length in lengths):
            return f"needs even lengths, and they are {lengths[0]} and {lengths[1]} (config.data.sequence_length)"
        if has_row_bias:
            # JAX's tests once said that the gradient of a bias of several rows is zeros, without a warning.
            return "has not been seen to give a bias of each row its gradient, and this model's positions need one"
        if has_window and not causal:
            return "has causal windows only, and this model has local layers that see both sides"
        if has_logit_cap:
            return "has no cap of attention logits, and config.model.attention_logit_cap is set"
        if sequence > 1:
            return f"needs whole lengths, and config.mesh.{LENGTH_AXIS} is {sequence}"
    if name in ("tpu_flash", "tpu_splash"):
        if platform != "tpu":
            return f"needs a TPU, and this is a {platform.upper()}"
        if head_dim != 64 and head_dim % 128:
            return f"needs config.model.head_dim to be 64 or a multiple of 128, and it is {head_dim}"
        if has_prefix:
            return "has no bidirectional prefix, and config.objective makes one in each row"
        if sequence > 1 and any(length % (sequence * LANES) for length in lengths):
            return (
                f"needs lengths that are multiples of {sequence * LANES} with config.mesh.{LENGTH_AXIS}={sequence}, "
                f"and they are {lengths[0]} and {lengths[1]} (config.data.sequence_length)"
            )
        if name == "tpu_splash" and has_bias:
            return "takes no bias, and this model has relative positions ('tpu_flash' takes one)"
        if name == "tpu_flash" and (has_window or has_logit_cap):
            return "has neither windows nor a cap of attention logits ('tpu_splash' has both)"
        if name == "tpu_flash" and causal and sequence > 1:
            return f"has no causal mask of a part of a row, and config.mesh.{LENGTH_AXIS} is {sequence}"
    return None


# --- xla -----------------------------------------------------------------------------------------------------------


def _xla(q, k, v, mask: Mask, bias, scale, logit_cap):
    if axis_size(LENGTH_AXIS) > 1:
        return ring_attention(q, k, v, mask, bias, scale, logit_cap)
    logits = masked_logits(q, k, mask, bias, scale, logit_cap)
    # The softmax divides after the product with v, where there are K and not S numbers a row.
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    return heads_last(weighted_sum(weights, v) / weights.sum(-1)[..., None]).astype(q.dtype)


# --- GPU -----------------------------------------------------------------------------------------------------------


def _cudnn(q, k, v, mask: Mask, bias, scale, logit_cap):
    assert logit_cap is None
    array = None  # becomes one more additive bias [B, 1, T, S], in q's dtype
    if mask.prefix is not None:  # says all: the kernel's own causal mask would hide the prefix
        array, mask = mask.array(q.shape[1], k.shape[1]), Mask()
    elif mask.query_segment_ids is not None:
        array = Mask(False, mask.query_segment_ids, mask.key_segment_ids).array(q.shape[1], k.shape[1])
    bias = None if bias is None else bias.astype(q.dtype)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        array,
        scale=scale,
        is_causal=mask.causal,
        local_window_size=None if mask.window is None else mask.reach,
        implementation="cudnn",
    )


_IMPLEMENTATIONS = {"xla": _xla, "cudnn": _cudnn, "tpu_flash": tpu_flash, "tpu_splash": tpu_splash}
