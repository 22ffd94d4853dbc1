"""Scaled dot-product attention as one function, with backends for each type of hardware.

`xla` is the reference and runs on every platform. `cudnn` (GPU), `tpu_flash` and `tpu_splash` (TPU) never materialize
the [B, H, T, S] attention weights, and neither does `tiled`, which supports what they do not. Callers describe the mask
with a `Mask`; only a backend that needs a mask array builds one. If the mesh shards the sequence dimension, `xla`
becomes ring attention, and the TPU kernels all-gather keys and values.
"""

import functools
from typing import Optional

import chex
import jax
import jax.numpy as jnp

from pretrainax.config import UserError
from pretrainax.layers.attention_mask import Mask, heads_last, masked_logits, pad, weighted_sum
from pretrainax.layers.attention_spec import NO_OPTIONS, AttentionSpec, Backend, Weights, Work
from pretrainax.layers.attention_work import all_pairs
from pretrainax.layers.gpu_attention import cudnn, cudnn_obstacle, cudnn_work
from pretrainax.layers.rematerialization import saved_residual
from pretrainax.layers.sequence_parallel import ring_attention
from pretrainax.layers.tiled_attention import tiled, tiled_obstacle, tiled_work
from pretrainax.layers.tpu_attention import (
    LANES,
    tpu_flash,
    tpu_flash_obstacle,
    tpu_splash,
    tpu_splash_obstacle,
    tpu_work,
)
from pretrainax.sharding.axes import LENGTH_AXIS
from pretrainax.sharding.mesh import GPUS, axis_size


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    bias: Optional[jax.Array] = None,
    scale: float,
    implementation: str = "xla",
    weights: Weights = NO_OPTIONS,
) -> jax.Array:
    """Computes softmax(scale · q kᵀ + bias) v (Vaswani et al. 2017, section 3.2.1), with the softmax in float32.

    Args:
      q: [B, T, H, K]; k: [B, S, G, K]; v: [B, S, G, V], V at most K. Query heads [i·H/G, (i+1)·H/G) share key head i
        (Ainslie et al. 2023).
      mask: the keys that each query may attend to. If there is no such key, the query's output is finite but
        meaningless.
      bias: optional [1 or B, H, T, S] array that is added to the scaled logits and receives gradients.
      scale: 1/sqrt(K) for most models, 1 for T5.
      implementation: the name of a backend, as returned by `choose_backend`.
      weights: a logit cap; dropout and sinks, which only `xla` and `tiled` support. Dropout is applied after the
        softmax (as in BERT's code), so the weights need not sum to 1. With sinks, the weights of the keys sum to less
        than 1, because the sink receives the remaining weight.

    Returns:
      [B, T, H, V] in q's dtype.

    Raises:
      AssertionError: if an axis has the wrong size; the message names the axis.
    """
    _check_shapes(q, k, v, mask, bias)
    takes_any_width = implementation in ("xla", "tiled") and axis_size(LENGTH_AXIS) == 1
    if (width := v.shape[3]) < k.shape[3] and not takes_any_width:
        # Other kernels and ring attention require values as wide as keys.
        attend = functools.partial(attention, mask=mask, bias=bias, scale=scale, weights=weights)
        return attend(q, k, pad(v, 3, k.shape[3]), implementation=implementation)[..., :width]
    options = () if weights.drop is None and weights.sinks is None else (weights,)

    def run(q, k, v, mask):
        return BACKENDS[implementation].kernel(q, k, v, mask, bias, scale, weights.logit_cap, *options)

    if mask.windowed is None or implementation == "xla":
        return run(q, k, v, mask)
    # A fused kernel is compiled for one mask. `cond` therefore contains two kernels, with and without the window, and
    # each layer runs one of them.
    with_window, without_window = mask.replace(windowed=None), mask.replace(windowed=None, window=None)
    return jax.lax.cond(mask.windowed, lambda *x: run(*x, with_window), lambda *x: run(*x, without_window), q, k, v)


def _check_shapes(q, k, v, mask: Mask, bias) -> None:
    """Raises AssertionError if an axis has a wrong size that JAX might silently broadcast.

    The check runs at trace time and costs nothing at run time.
    """
    chex.assert_rank([q, k, v], 4, custom_message="q is [B, T, H, K], k is [B, S, G, K], v is [B, S, G, V]")
    (b, t, h, d), (s, g) = q.shape, k.shape[1:3]
    chex.assert_shape(k, (b, s, g, d), custom_message="k is [B, S, G, K] with B and K of q [B, T, H, K]")
    chex.assert_shape(v, (b, s, g, None), custom_message="v is [B, S, G, V] with B, S and G of k [B, S, G, K]")
    chex.assert_is_divisible(h, g, custom_message="G heads of k and v serve H / G heads of q each")
    if bias is not None:
        chex.assert_shape(bias, ({1, b}, h, t, s), custom_message="bias is [1 or B, H, T, S]")
    mask.check_shapes(b, t, s)


def choose_backend(requested: str, platform: str, spec: AttentionSpec) -> tuple[str, Optional[str]]:
    """Returns the backend for `config.train.attention = requested`, and a warning if no fused kernel supports the spec.

    Args:
      requested: the name of a backend, or "auto" to select the fastest backend that supports the spec.
      platform: the result of `sharding.mesh.platform()`.

    Returns:
      The name of the backend, and the warning. The warning is None if the platform has no fused kernel, or if
        `requested` names a backend.

    Raises:
      UserError: if the requested backend is unknown or cannot compute this attention on this platform.
    """
    if requested == "auto":
        return _fastest_backend(platform, spec)
    if requested in BACKENDS:
        obstacle = BACKENDS[requested].obstacle(spec, platform)
    else:
        obstacle = f"is unknown (allowed: auto, {', '.join(BACKENDS)})"
    if obstacle:
        raise UserError(
            f"config.train.attention is {requested!r}, which {obstacle}; set it to 'auto', or to 'xla', which "
            "always runs"
        )
    return requested, None


def _fastest_backend(platform: str, spec: AttentionSpec) -> tuple[str, Optional[str]]:
    """Returns the fastest available backend, and a warning if no fused kernel of the platform supports the spec."""
    if platform in GPUS:
        candidates = "cudnn", "tiled"
    elif platform == "tpu" and max(spec.lengths) >= LANES:  # at shorter lengths, the kernels are not faster
        candidates = "tpu_splash" if spec.bias == "none" else "tpu_flash", "tiled"
    else:
        return "xla", None
    obstacles = {name: BACKENDS[name].obstacle(spec, platform) for name in candidates}
    for name, obstacle in obstacles.items():
        if obstacle is None:
            return name, None
    reasons = ", and ".join(f"{name!r} {obstacle}" for name, obstacle in obstacles.items())
    return "xla", f"SLOW ATTENTION: 'xla' is used on this {platform.upper()}, because {reasons}"


# --- xla -----------------------------------------------------------------------------------------------------------


def _xla(q, k, v, mask: Mask, bias, scale, logit_cap, options=NO_OPTIONS):
    """Implements the `xla` backend, which becomes ring attention if the mesh shards the sequence dimension.

    Args:
      options: dropout and sinks.
      The other arguments and the result are as in `attention`.
    """
    drop, sinks, _ = options
    if axis_size(LENGTH_AXIS) > 1:
        assert drop is None and sinks is None  # sharding.arrays.check_mesh rejects both
        return ring_attention(q, k, v, mask, bias, scale, logit_cap)
    logits = masked_logits(q, k, mask, bias, scale, logit_cap)
    if logit_cap is None:  # with a cap, the gradient needs q kᵀ itself, which is saved instead
        logits = saved_residual(logits)
    # The softmax is normalized after the multiplication by v: the division then covers K instead of S numbers per
    # query.
    largest, sink_weight = jax.lax.stop_gradient(logits.max(-1, keepdims=True)), 0.0
    if sinks is not None:
        # [H] -> [1, G, R, 1, 1]
        sinks = sinks.astype(jnp.float32).reshape(1, *logits.shape[1:3], 1, 1)
        largest = jnp.maximum(largest, jax.lax.stop_gradient(sinks))
        sink_weight = jnp.exp(sinks - largest)[..., 0]
    weights = jnp.exp(logits - largest)
    after_dropout = weights if drop is None else drop(weights)
    return heads_last(weighted_sum(after_dropout, v) / (weights.sum(-1) + sink_weight)[..., None]).astype(q.dtype)


def _no_obstacle(spec: AttentionSpec, platform: str) -> None:
    return None


def _xla_work(spec: AttentionSpec) -> Work:
    """Returns the `Work` of the `xla` backend, which computes all query-key pairs, including masked ones.

    If the mesh shards the sequence dimension, the backward of ring attention recomputes the logits.
    """
    return Work(all_pairs(spec), recomputed=int(spec.sequence > 1))


BACKENDS = {
    "xla": Backend(_xla, _no_obstacle, _xla_work),
    "cudnn": Backend(cudnn, cudnn_obstacle, cudnn_work),
    "tiled": Backend(tiled, tiled_obstacle, tiled_work),
    "tpu_flash": Backend(tpu_flash, tpu_flash_obstacle, tpu_work),
    "tpu_splash": Backend(tpu_splash, tpu_splash_obstacle, tpu_work),
}
