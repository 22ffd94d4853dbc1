"""Disentangled attention: what a token says and where it stands meet in the logits, each with each (He et al. 2020,
section 3.1).

    logits[q, k] = scale · (query[q] · key[k] + query[q] · position_key[d] + key[k] · position_query[d])

with d the bucket of q - k, and position keys and queries made of one table of vectors by the maps of the contents
(DeBERTa v2; the first DeBERTa had maps of their own). The last two terms are a bias on the logits, another one for
each row of a batch.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pretrainax.config import ModelConfig
from pretrainax.layers.linear import normal_init
from pretrainax.layers.norm import Norm
from pretrainax.sharding.arrays import constrain

_BLOCK = 128  # queries that share a window of distances


def log_bucket(distance: np.ndarray, num_buckets: int, max_distance: int) -> np.ndarray:
    """The row in a table of 2 · num_buckets of each distance (query's place - key's place), as in the code of DeBERTa
    v2.

    Row num_buckets is distance 0. A direction has num_buckets rows: the first half for exact distances, the rest for
    ranges that grow logarithmically up to max_distance; the last one takes all beyond.
    """
    exact, size = num_buckets // 2, np.abs(distance)
    growth = np.log(np.maximum(size, 1) / exact) / math.log((max_distance - 1) / exact)  # 0 at `exact`, 1 at the end
    # The small pull keeps a whole number from being raised to the one above, whatever the rounding of the logarithm.
    ranges = exact + np.ceil(growth * (exact - 1) - 1e-6).astype(distance.dtype)
    bucket = np.sign(distance) * np.where(size <= exact, size, ranges)
    return np.clip(bucket + num_buckets, 0, 2 * num_buckets - 1)


def rows_by_distance(config: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The R rows of the table that a text of T tokens needs, and which of them each distance 1 - T … T - 1 has."""
    position = config.position
    rows = log_bucket(np.arange(1 - length, length), position.num_buckets, position.max_distance)
    return np.unique(rows, return_inverse=True)


class RelativeTable(nn.Module):
    """The vectors of relative positions that all layers share, normed; those for T tokens, [R, D] float32."""

    config: ModelConfig

    @nn.compact
    def __call__(self, length: int) -> jax.Array:
        config = self.config
        shape = 2 * config.position.num_buckets, config.d_model
        table = self.param("embedding", normal_init(config, fan_in=1), shape, jnp.float32)
        rows, _ = rows_by_distance(config, length)
        return Norm(config, name="norm")(constrain(table, P())[rows])


def disentangled_bias(q: jax.Array, k: jax.Array, position_q: jax.Array, position_k: jax.Array) -> jax.Array:
    """query · position key + key · position query, not scaled: [B, H, T, T] float32.

    Args:
      q, k: [B, T, H, K].
      position_q, position_k: [2T-1, H, K], of the distances (query's place - key's place) 1 - T … T - 1.
    """
    to_position = _by_place(q, position_k[::-1])  # as _by_place counts distances: the key's place - the query's
    to_content = _by_place(k, position_q)
    return to_position + to_content.swapaxes(2, 3)


def _by_place(x: jax.Array, positions: jax.Array) -> jax.Array:
    """out[b, h, i, j] = x[b, i, h] · positions[j - i + T - 1, h]; [B, T, H, K], [2T-1, H, K] -> [B, H, T, T] float32.

    By products and shape alone: the gradient of a lookup with T² indices would add its numbers up one by one. A block
    of C places i needs a window of T + C - 1 distances, not all of them.
    """
    b, t, h, d = x.shape
    c = _BLOCK if t % _BLOCK == 0 else t
    # [2T-1, H, K] -> [T/C, T+C, H, K]; the last one of a window is there for the shape only
    positions = jnp.pad(positions, ((0, 1), (0, 0), (0, 0)))
    windows = jnp.stack([positions[start : start + t + c] for start in range(t - c, -1, -c)])
    products = jnp.einsum(
        "BICHK,INHK->BHICN", x.reshape(b, t // c, c, h, d), windows, preferred_element_type=jnp.float32
    )
    # Read in rows that are one shorter, the columns move by one place a row: [C, T+C] -> [C, T+C-1] -> [C, T]
    flat = products.reshape(b, h, t // c, c * (t + c))[..., c - 1 : c - 1 + c * (t + c - 1)]
    return flat.reshape(b, h, t // c, c, t + c - 1)[..., :t].reshape(b, h, t, t)
