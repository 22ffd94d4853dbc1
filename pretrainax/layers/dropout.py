"""Dropout (Srivastava et al. 2014), whose backward draws the same numbers again and keeps no mask."""

import functools
from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class Dropout(nn.Module):
    """Sets a share of numbers to 0 in training, and scales the others up so that the mean stays."""

    rate: float
    deterministic: Optional[bool] = None

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: Optional[bool] = None) -> jax.Array:
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        return x if deterministic or not self.rate else dropped(self.rate, x, self.make_rng("dropout"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dropped(rate: float, x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns x with a share of its numbers set to 0 and the others divided by 1 - rate, of x's shape and dtype."""
    return _left(rate, x, key)


def _left(rate: float, x: jax.Array, key: jax.Array) -> jax.Array:
    left = jax.random.bits(key, x.shape, jnp.uint32) >= np.uint32(round(rate * 2**32))
    return jnp.where(left, x.astype(jnp.float32) / (1.0 - rate), 0.0).astype(x.dtype)


dropped.defvjp(
    lambda rate, x, key: (_left(rate, x, key), key),
    lambda rate, key, gradient: (_left(rate, gradient, key), None),
)
