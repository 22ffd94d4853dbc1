"""The norm layers: LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019)."""

import functools
from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.rematerialization import barrier, saved_residual


class Norm(nn.Module):
    """Normalizes the last axis of x in float32; the result has the dtype of x.

    `config.norm` selects the formula:

    - "layer": (x - mean) / sqrt(variance + ε) · scale + bias
    - "rms": x / sqrt(mean(x²) + ε) · scale
    - "rms_plus_one": like "rms" with the factor 1 + scale, so that weight decay pulls the factor to 1
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kind = self.config.norm
        is_plus_one = kind == "rms_plus_one"
        init = nn.initializers.zeros if is_plus_one else nn.initializers.ones
        scale, bias = self.param("scale", init, x.shape[-1:], jnp.float32), None
        if kind == "layer" and self.config.use_bias:
            bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], jnp.float32)
        return normalised(kind == "layer", self.config.norm_epsilon, x, 1.0 + scale if is_plus_one else scale, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def normalised(centred: bool, epsilon: float, x: jax.Array, scale: jax.Array, bias: Optional[jax.Array]) -> jax.Array:
    """Normalizes x [..., D] over the last axis, then multiplies by scale [D] and adds the optional bias [D].

    x is divided by sqrt(mean(x²) + epsilon). If `centred`, the mean of x is subtracted first.
    """
    return _normalize_with_residuals(centred, epsilon, x, scale, bias)[0]


def _normalize_with_residuals(centred, epsilon, x, scale, bias):
    """Returns the normalized x, and the residuals that the backward needs.

    The residuals are x, scale, bias, and for each token the mean (None unless `centred`) and the inverse root mean
    square, [...] each.
    """
    y = x.astype(jnp.float32)
    # The saved values, so that the backward can recompute z without another pass that computes them
    mean = saved_residual(jnp.mean(y, axis=-1)) if centred else None
    inverse = saved_residual(jax.lax.rsqrt(_variance(y, mean, x.dtype) + epsilon))
    if mean is not None:
        y -= mean[..., None]
    z = y * inverse[..., None] * _expand(x, scale)
    z = (z if bias is None else z + _expand(x, bias)).astype(x.dtype)
    return z, (x, scale, bias, mean, inverse)


def _variance(y: jax.Array, mean: Optional[jax.Array], dtype: jnp.dtype) -> jax.Array:
    """Computes the mean of (y - mean)² over the last axis; `mean` is 0 if it is None.

    If y had 16 bits, the mean of y² is computed in the same pass over memory as the mean of y. Subtracting the squared
    mean loses digits, but the error is smaller than the error of rounding y to 16 bits.
    """
    if mean is None or dtype != jnp.float32:
        square = jnp.mean(jnp.square(y), axis=-1)
        return square if mean is None else jnp.maximum(square - jnp.square(mean), 0)
    return jnp.mean(jnp.square(y - mean[..., None]), axis=-1)


def _expand(x: jax.Array, vector: jax.Array) -> jax.Array:
    # [D] -> [1, ..., D]
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def _normalize_backward(centred, epsilon, residuals, gradient):
    """Computes the gradients of x, scale and bias with manually derived formulas (Ba et al. 2016).

    The backward reads x and the gradient twice: for the sums over tokens, and for the gradient of x. Autodiff would
    save or write normalized copies in float32.
    """
    x, scale, bias, mean, inverse = residuals
    y, gradient = barrier(x).astype(jnp.float32), gradient.astype(jnp.float32)
    if centred:
        y -= mean[..., None]
    y *= inverse[..., None]
    tokens = tuple(range(x.ndim - 1))
    dscale, dbias = jnp.sum(gradient * y, tokens), None if bias is None else jnp.sum(gradient, tokens)
    dy = gradient * _expand(x, scale)
    dx = dy - y * jnp.mean(dy * y, axis=-1, keepdims=True)
    if centred:
        dx -= jnp.mean(dy, axis=-1, keepdims=True)
    return (dx * inverse[..., None]).astype(x.dtype), dscale, dbias


normalised.defvjp(_normalize_with_residuals, _normalize_backward)
