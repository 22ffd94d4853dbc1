"""Where a token stands: sinusoidal, rotary and T5's relative positions. (Learned ones are an Embedding.)"""

import math
from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import LinearScaling, ModelConfig, RotaryPositions, RotaryScaling
from pretrainax.layers.linear import normal_init


def sinusoidal(positions: jax.Array, features: int) -> jax.Array:
    """[B, T] -> [B, T, D] float32: sin(p · w_i), then cos(p · w_i), w_i = 10,000^(-2i / D) (Vaswani et al. 2017,
    section 3.5).

    NOTE The paper takes sines and cosines in turn; its authors' code (tensor2tensor), Marian and this put all sines
    first. The two differ by a permutation of the model's features.
    """
    angles = _angles(positions, 10_000.0 ** (-np.arange(0, features, 2) / features))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)  # 2 x [B, T, D/2] -> [B, T, D]


def _angles(positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """[B, T], [F] -> [B, T, F] radians."""
    return positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)[None, None, :]


# --- rotary --------------------------------------------------------------------------------------------------------


Rotary = tuple[jax.Array, jax.Array]  # cosines and sines of each plane's angle, [B, T, K/2] float32


def rotary_angles(positions: jax.Array, head_dim: int, theta: float, scaling: Optional[RotaryScaling] = None) -> Rotary:
    """[B, T] -> cosines and sines of each plane's angle, each [B, T, K/2] float32 (Su et al. 2021, section 3.2.2)."""
    angles = _angles(positions, _stretch(theta ** (-np.arange(0, head_dim, 2) / head_dim), scaling))
    return jnp.cos(angles), jnp.sin(angles)


def _stretch(frequencies: np.ndarray, scaling: Optional[RotaryScaling]) -> np.ndarray:
    """LongContextScaling divides frequencies that turn fewer than `low` times in the old context by `factor`, leaves
    those that turn more than `high` times, and goes from one to the other in between."""
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    turns = scaling.original_length * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def rotary_of(config: ModelConfig, positions: jax.Array) -> Optional[Rotary]:
    """The angles of global layers; None for a model without rotary positions."""
    if isinstance(config.position, RotaryPositions):
        return rotary_angles(positions, config.dim_per_head, config.position.theta, config.position.scaling)
    return None


def local_rotary_of(config: ModelConfig, positions: jax.Array) -> Optional[Rotary]:
    """The angles of local layers, where they have their own."""
    if isinstance(config.position, RotaryPositions) and config.position.local_theta is not None:
        return rotary_angles(positions, config.dim_per_head, config.position.local_theta)
    return None


def rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Turns each plane of x [B, T, H, K] by its angle, in float32.

    NOTE Plane i is (x[i], x[i + K/2]), as in GPT-NeoX and transformers; the paper and Meta's files take neighbours,
    (x[2i], x[2i + 1]). The two differ by a permutation of the rows of the query and key kernels.
    """
    cosines, sines = cosines[:, :, None, :], sines[:, :, None, :]  # [B, T, K/2] -> [B, T, 1, K/2]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cosines - b * sines, b * cosines + a * sines], axis=-1).astype(x.dtype)


# --- T5 ------------------------------------------------------------------------------------------------------------


def relative_bucket(distance: np.ndarray, num_buckets: int, max_distance: int, bidirectional: bool) -> np.ndarray:
    """The bucket of each distance (key's place - query's place) (Raffel et al. 2020, section 2.1).

    A direction has n buckets: the first n/2 for exact distances, the rest for ranges that grow logarithmically up to
    max_distance; the last one takes all beyond. Keys after the query have the upper half of the buckets if
    `bidirectional`, else bucket 0.
    """
    upper = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        upper = num_buckets * (distance > 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = num_buckets // 2
    growth = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)  # 0 at `exact`, 1 at the end
    # The small push keeps a whole number from being cut to the one below, whatever the rounding of the logarithm.
    ranges = exact + np.floor(growth * (num_buckets - exact) + 1e-6).astype(distance.dtype)
    return upper + np.where(distance < exact, distance, np.minimum(ranges, num_buckets - 1))


class RelativeBias(nn.Module):
    """A trained scalar a head and bucket, as a bias on the logits of self-attention: [1, H, T, T] float32.

    Distances are between places in the row, not `positions`: inside a segment they are the same, and attention does
    not leave it. So all rows share one bias.
    """

    config: ModelConfig
    bidirectional: bool

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        config, position = self.config, self.config.position
        table = self.param(
            "embedding", normal_init(config, config.d_model), (position.num_buckets, config.num_heads), jnp.float32
        )
        distances = np.arange(1 - length, length)
        buckets = relative_bucket(distances, position.num_buckets, position.max_distance, self.bidirectional)
        return _toeplitz(table[buckets].T, length)[None]  # [2T-1, H] -> [H, T, T] -> [1, H, T, T]


def _toeplitz(values: jax.Array, length: int) -> jax.Array:
    """out[h, q, k] = values[h, k - q + T - 1]; [H, 2T-1] -> [H, T, T].

    By shape alone, because the gradient of a lookup would add T² numbers to a few buckets one by one: repeated with
    period n = 2T - 1 and read in rows of n + 1, the values move by one place a row.
    """
    heads, n = values.shape
    repeated = jnp.tile(values, (1, length + 1))[:, : length * (n + 1)]
    return repeated.reshape(heads, length, n + 1)[:, ::-1, :length]
