"""Dropout (Srivastava et al. 2014) whose backward regenerates the random numbers instead of saving a mask."""

import functools
from typing import NamedTuple, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class Dropout(nn.Module):
    """Sets a random fraction `rate` of the elements to 0 in training, and scales the others to keep the mean unchanged.

    With `deterministic`, x is returned unchanged. Pass `deterministic` either to the constructor or to the call.
    """

    rate: float
    deterministic: Optional[bool] = None

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: Optional[bool] = None) -> jax.Array:
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        return x if deterministic or not self.rate else apply_dropout(self.rate, x, self.make_rng("dropout"))

    def with_key(self) -> "KeyedDropout":
        """Returns the dropout of the next call as a function, with its key, for a kernel that draws the numbers."""
        return KeyedDropout(self.rate, self.make_rng("dropout"))


class KeyedDropout(NamedTuple):
    """Dropout of `rate` with the random numbers of `key`."""

    rate: float
    key: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return apply_dropout(self.rate, x, self.key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply_dropout(rate: float, x: jax.Array, key: jax.Array) -> jax.Array:
    """Sets a random fraction `rate` of the elements of x to 0, and divides the other elements by 1 - rate.

    The result has the shape and the dtype of x. `key` determines which elements become 0.
    """
    return _apply_dropout(rate, x, key)


def _apply_dropout(rate: float, x: jax.Array, key: jax.Array) -> jax.Array:
    mask = jax.random.bits(key, x.shape, jnp.uint32) >= threshold(rate)
    return jnp.where(mask, x.astype(jnp.float32) / (1.0 - rate), 0.0).astype(x.dtype)


def threshold(rate: float) -> np.uint32:
    """Returns the number below which 32 random bits drop an element."""
    return np.uint32(round(rate * 2**32))


apply_dropout.defvjp(
    lambda rate, x, key: (_apply_dropout(rate, x, key), key),
    lambda rate, key, gradient: (_apply_dropout(rate, gradient, key), None),
)
