"""Scaled dot-product attention as one function, with backends for each type of hardware.

`xla` is the reference and runs on every platform. `cudnn` (GPU), `tpu_flash` and `tpu_splash` (TPU) never materialize
the [B, H, T, S] attention weights. Callers describe the mask with a `Mask`; only a backend that needs a mask array
builds one. If the mesh shards the sequence dimension, `xla` becomes ring attention, and the TPU kernels all-gather keys
and values.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, Optional

import chex
import jax
import jax.numpy as jnp

from pretrainax.config import UserError
from pretrainax.layers.attention_mask import Mask, heads_last, masked_logits, pad, weighted_sum
from pretrainax.layers.attention_spec import AttentionSpec, Backend, Work
from pretrainax.layers.attention_work import all_pairs
from pretrainax.layers.gpu_attention import cudnn, cudnn_obstacle, cudnn_work
from pretrainax.layers.rematerialization import saved_residual
from pretrainax.layers.sequence_parallel import ring_attention
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
    logit_cap: Optional[float] = None,
    implementation: str = "xla",
) -> jax.Array:
    """Computes softmax(scale · q kᵀ + bias) v (Vaswani et al. 2017, section 3.2.1), with the softmax in float32.

    Args:
      q: [B, T, H, K]; k: [B, S, G, K]; v: [B, S, G, V], V at most K. Query heads [i·H/G, (i+1)·H/G) share key head i
        (Ainslie et al. 2023).
      mask: the keys that each query may attend to. If there is no such key, the query's output is finite but
        meaningless.
      bias: optional [1 or B, H, T, S] array that is added to the scaled logits and receives gradients.
      scale: 1/sqrt(K) for most models, 1 for T5.
      logit_cap: if given, scaled logits x become cap · tanh(x / cap) (Gemma 2, arXiv 2408.00118, section 2).
      implementation: the name of a backend, as returned by `choose_backend`.

    Returns:
      [B, T, H, V] in q's dtype.

    Raises:
      AssertionError: if an axis has the wrong size; the message names the axis.
    """
    _check_shapes(q, k, v, mask, bias)
    if (width := v.shape[3]) < k.shape[3] and (implementation != "xla" or axis_size(LENGTH_AXIS) > 1):
        # Kernels and ring attention require values as wide as keys.
        attend = functools.partial(attention, mask=mask, bias=bias, scale=scale, logit_cap=logit_cap)
        return attend(q, k, pad(v, 3, k.shape[3]), implementation=implementation)[..., :width]
    run = functools.partial(BACKENDS[implementation].kernel, bias=bias, scale=scale, logit_cap=logit_cap)
    if mask.windowed is None or implementation == "xla":
        return run(q, k, v, mask)
    # A fused kernel is compiled for one mask. `cond` therefore contains two kernels, with and without the window, and
    # each layer runs one of them.
    with_window, without_window = mask.replace(windowed=None), mask.replace(windowed=None, window=None)
    return jax.lax.cond(mask.windowed, lambda *x: run(*x, with_window), lambda *x: run(*x, without_window), q, k, v)


class Weights(NamedTuple):
    """Options that modify the attention weights: dropout and attention sinks. Only the `xla` backend supports them."""

    drop: Optional[Callable[[jax.Array], jax.Array]] = None  # dropout for the weights [B, G, R, T, S]; None: no dropout
    sinks: Optional[jax.Array] = None  # [H], logit of an extra key with value 0 per head (gpt-oss); None: no sinks


_NO_OPTIONS = Weights()


def attention_with_weights(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    weights: Weights,
    mask: Mask,
    bias: Optional[jax.Array] = None,
    scale: float,
    logit_cap: Optional[float] = None,
) -> jax.Array:
    """Computes `attention` with the `xla` backend, applying dropout or attention sinks to the attention weights.

    Dropout is applied after the softmax (as in BERT's code), so the weights need not sum to 1. With sinks, the weights
    of the keys sum to less than 1, because the sink receives the remaining weight.

    Args:
      weights: the dropout and the sinks. The other arguments and the result are as in `attention`.
    """
    _check_shapes(q, k, v, mask, bias)
    return _xla(q, k, v, mask, bias, scale, logit_cap, weights)


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
    """Returns the backend for `config.train.attention = requested`, and a warning if a faster backend is unavailable.

    Args:
      requested: the name of a backend, or "auto" to select the fastest backend that supports the spec.
      platform: the result of `sharding.mesh.platform()`.

    Returns:
      The name of the backend, and the warning. The warning is None if the platform has no faster backend, or if
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
    """Returns the fastest available backend, and a warning if the spec excludes the platform's fastest backend."""
    if platform in GPUS:
        best = "cudnn"
    elif platform == "tpu" and max(spec.lengths) >= LANES:  # at shorter lengths, the kernels are not faster
        best = "tpu_splash" if spec.bias == "none" else "tpu_flash"
    else:
        return "xla", None
    obstacle = BACKENDS[best].obstacle(spec, platform)
    if obstacle:
        return "xla", f"SLOW ATTENTION: 'xla' is used on this {platform.upper()}, because {best!r} {obstacle}"
    return best, None


# --- xla -----------------------------------------------------------------------------------------------------------


def _xla(q, k, v, mask: Mask, bias, scale, logit_cap, options=_NO_OPTIONS):
    """Implements the `xla` backend, which becomes ring attention if the mesh shards the sequence dimension.

    Args:
      options: dropout and sinks.
      The other arguments and the result are as in `attention`.
    """
    drop, sinks = options
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
    "tpu_flash": Backend(tpu_flash, tpu_flash_obstacle, tpu_work),
    "tpu_splash": Backend(tpu_splash, tpu_splash_obstacle, tpu_work),
}
