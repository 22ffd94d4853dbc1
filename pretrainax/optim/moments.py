"""Stores the moments of an optimizer in bfloat16, with stochastic rounding.

Rounding to the nearest bfloat16 number would stop a moment whose update is below 1/256 of it: with b2=0.999, the second
moment could not fall. Stochastic rounding goes up or down with probabilities that keep the mean (Gupta et al. 2015,
arXiv 1502.02551, recalled).
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pretrainax.layers.hashed_keys import hashed_key
from pretrainax.sharding.param_paths import PyTree

MomentDtype = Literal["float32", "bfloat16"]
_KEPT_BITS = np.uint32(0xFFFF0000)  # bits of a float32 number that bfloat16 has


def in_bfloat16(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wraps a transformation of Adam's kind, whose moments are then stored in bfloat16 and updated in float32.

    The random numbers are hashes of the number of updates and of the element's place, so a resumed run repeats them.

    Args:
      transform: its state has the fields mu, nu and count.
    """

    def init(params: PyTree) -> optax.OptState:
        state = transform.init(params)
        return state._replace(**{name: _cast(getattr(state, name), jnp.bfloat16) for name in ("mu", "nu")})

    def update(updates, state, params=None):
        moments = {name: _cast(getattr(state, name), jnp.float32) for name in ("mu", "nu")}
        updates, state = transform.update(updates, state._replace(**moments), params)
        keys = jax.random.split(jax.random.fold_in(hashed_key(jax.random.key(0)), state.count))
        mu, nu = (_rounded(moment, key) for moment, key in zip((state.mu, state.nu), keys, strict=True))
        return updates, state._replace(mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds finite float32 numbers to one of the two nearest bfloat16 numbers, so that the expected value is `x`.

    Other numbers keep their value.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    rounded = jax.lax.bitcast_convert_type(bits & _KEPT_BITS, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _rounded(moment: PyTree, key: jax.Array) -> PyTree:
    leaves, structure = jax.tree.flatten(moment)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [round_stochastically(x, k) for x, k in zip(leaves, keys, strict=True)])


def _cast(moment: PyTree, dtype: jnp.dtype) -> PyTree:
    return jax.tree.map(lambda x: x.astype(dtype), moment)
