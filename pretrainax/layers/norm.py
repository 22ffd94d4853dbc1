"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019)."""

from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.made_again import apart


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


def _normalised(
    centred: bool, epsilon: float, x: jax.Array, scale: jax.Array, bias: Optional[jax.Array] = None
) -> jax.Array:
    """Returns x [..., D], less its mean if it is to be centred, divided by its size; times scale [D], plus bias [D]."""
    y = x.astype(jnp.float32)
    mean, inverse = _mean_and_inverse(centred, epsilon, y)
    y = (y - mean) * inverse * _beside(x, scale)
    return (y if bias is None else y + _beside(x, bias)).astype(x.dtype)


def _mean_and_inverse(centred: bool, epsilon: float, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what is taken away from y [..., D], and what it is multiplied by then: [..., 1] each."""
    mean = jnp.mean(y, axis=-1, keepdims=True) if centred else jnp.zeros_like(y[..., :1])
    return mean, jax.lax.rsqrt(jnp.mean(jnp.square(y - mean), axis=-1, keepdims=True) + epsilon)


def _beside(x: jax.Array, vector: jax.Array) -> jax.Array:
    # [D] -> [1, ..., D]
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def _normalised_backward(centred, epsilon, inputs, gradient):
    """Reads x and the gradient twice: for sums over tokens, and for the gradient of x (Ba et al. 2016, by hand).

    Autodiff would keep, or write, normed copies in float32.
    """
    x, scale, bias = inputs
    y, gradient = apart(x).astype(jnp.float32), gradient.astype(jnp.float32)
    # They are numbers of a token; left to itself, the compiler makes y of them, in float32, and writes that.
    mean, inverse = jax.lax.optimization_barrier(_mean_and_inverse(centred, epsilon, y))
    y = (y - mean) * inverse
    tokens = tuple(range(x.ndim - 1))
    dscale, dbias = jnp.sum(gradient * y, tokens), None if bias is None else jnp.sum(gradient, tokens)
    dy = gradient * _beside(x, scale)
    dx = dy - y * jnp.mean(dy * y, axis=-1, keepdims=True)
    if centred:
        dx -= jnp.mean(dy, axis=-1, keepdims=True)
    return (dx * inverse).astype(x.dtype), dscale, dbias


normalised = jax.custom_vjp(_normalised, nondiff_argnums=(0, 1))
# not normalised, of which a gradient could not be differentiated again
normalised.defvjp(lambda *arguments: (_normalised(*arguments), arguments[2:]), _normalised_backward)
