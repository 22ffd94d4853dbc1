"""Sinusoidal positions: fixed sines and cosines of the position, added to the token embeddings."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import SinusoidalPositions
from pretrainax.layers.positions.base import Positions, register_positions


@register_positions(SinusoidalPositions)
class Sinusoidal(Positions):
    def embed(self, x: jax.Array, positions: jax.Array, embedding: None) -> jax.Array:
        return x + sinusoidal(positions, self.config.embedding_width)


def sinusoidal(positions: jax.Array, features: int) -> jax.Array:
    """Computes sin(p · w_i), then cos(p · w_i), with w_i = 10,000^(-2i / D): positions p [B, T] -> [B, T, D] float32.

    Source: Vaswani et al. 2017, section 3.5.

    NOTE The paper alternates sines and cosines. The code of its authors (tensor2tensor), Marian and this function put
    all sines first. The two orders differ by a permutation of the model's features.
    """
    chex.assert_rank(positions, 2, custom_message="positions are [B, T]")
    angles = radians(positions, 10_000.0 ** (-np.arange(0, features, 2) / features))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)  # 2 x [B, T, D/2] -> [B, T, D]


def radians(positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Computes angles in radians as positions times frequencies: [B, T], [F] -> [B, T, F] float32."""
    return positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)[None, None, :]
