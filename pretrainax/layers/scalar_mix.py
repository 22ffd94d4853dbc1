"""A weighted mean of the outputs of all layers, used as the input of a task head.

Source: Peters et al. 2018, arXiv 1802.05365, equation 1.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.sharding.rules import add_partition_rules

add_partition_rules(((r"scalar_mix/(weights|scale)", "rows"),))


class ScalarMix(nn.Module):
    """Computes gamma · sum over layers j of softmax(s)_j · x_j, [L, B, T, D] -> [B, T, D].

    The trained parameters are s [L] (`weights`, initially 0) and gamma [1] (`scale`, initially 1).
    """

    @nn.compact
    def __call__(self, layers: jax.Array) -> jax.Array:
        chex.assert_rank(layers, 4, custom_message="layers are [L, B, T, D]")
        weights = jax.nn.softmax(self.param("weights", nn.initializers.zeros, (layers.shape[0],), jnp.float32))
        scale = self.param("scale", nn.initializers.ones, (1,), jnp.float32)
        # [L, B, T, D] -> [B, T, D]
        mixed = jnp.tensordot(weights, layers, axes=1, preferred_element_type=jnp.float32)
        return (mixed * scale[None, None]).astype(layers.dtype)
