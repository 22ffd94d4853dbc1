"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig


class Norm(nn.Module):
    """Scales the last axis to unit size, in float32; the result is in x's dtype.

    "layer": (x - mean) / sqrt(variance + ε) · scale + bias; "rms": x / sqrt(mean(x²) + ε) · scale; "rms_plus_one":
    the same with 1 + scale, so that weight decay pulls it to 1.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        broadcast = (1,) * (x.ndim - 1) + x.shape[-1:]
        y = x.astype(jnp.float32)
        if self.config.norm == "layer":
            y -= jnp.mean(y, axis=-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.config.norm_epsilon)
        around_one = self.config.norm == "rms_plus_one"
        init = nn.initializers.zeros if around_one else nn.initializers.ones
        scale = self.param("scale", init, x.shape[-1:], jnp.float32).reshape(broadcast)
        y *= 1.0 + scale if around_one else scale
        if self.config.norm == "layer" and self.config.use_bias:
            y += self.param("bias", nn.initializers.zeros, x.shape[-1:], jnp.float32).reshape(broadcast)
        return y.astype(x.dtype)
