"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019)."""

import functools
from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.made_again import apart, kept


class Norm(nn.Module):
    """Scales the last axis to unit size, in float32; the result is in x's dtype.

    "layer": (x - mean) / sqrt(variance + ε) · scale + bias; "rms": x / sqrt(mean(x²) + ε) · scale; "rms_plus_one":
    the same with 1 + scale, so that weight decay pulls it to 1.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kind = self.config.norm
        around_one = kind == "rms_plus_one"
        init = nn.initializers.zeros if around_one else nn.initializers.ones
        scale, bias = self.param("scale", init, x.shape[-1:], jnp.float32), None
        if kind == "layer" and self.config.use_bias:
            bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], jnp.float32)
        return normalised(kind == "layer", self.config.norm_epsilon, x, 1.0 + scale if around_one else scale, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def normalised(centred: bool, epsilon: float, x: jax.Array, scale: jax.Array, bias: Optional[jax.Array]) -> jax.Array:
    """Returns x [..., D], less its mean if it is to be centred, divided by its size; times scale [D], plus bias [D]."""
    return _normalised(centred, epsilon, x, scale, bias)[0]


def _normalised(centred, epsilon, x, scale, bias):
    """Returns that, and what its backward needs: x, and of each token the mean, and what it is multiplied by: [...]."""
    y = x.astype(jnp.float32)
    mean = jnp.mean(y, axis=-1) if centred else None
    if centred:
        y -= mean[..., None]
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1) + epsilon)
    z = y * inverse[..., None] * _beside(x, scale)
    z = (z if bias is None else z + _beside(x, bias)).astype(x.dtype)
    return z, (x, scale, bias, None if mean is None else kept(mean), kept(inverse))


def _beside(x: jax.Array, vector: jax.Array) -> jax.Array:
    # [D] -> [1, ..., D]
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def _normalised_backward(centred, epsilon, residuals, gradient):
    """Reads x and the gradient twice: for sums over tokens, and for the gradient of x (Ba et al. 2016, by hand).

    Autodiff would keep, or write, normed copies in float32.
    """
    x, scale, bias, mean, inverse = residuals
    y, gradient = apart(x).astype(jnp.float32), gradient.astype(jnp.float32)
    if centred:
        y -= mean[..., None]
    y *= inverse[..., None]
    tokens = tuple(range(x.ndim - 1))
    dscale, dbias = jnp.sum(gradient * y, tokens), None if bias is None else jnp.sum(gradient, tokens)
    dy = gradient * _beside(x, scale)
    dx = dy - y * jnp.mean(dy * y, axis=-1, keepdims=True)
    if centred:
        dx -= jnp.mean(dy, axis=-1, keepdims=True)
    return (dx * inverse[..., None]).astype(x.dtype), dscale, dbias


normalised.defvjp(_normalised, _normalised_backward)
