"""T5's relative positions: a bias on the attention logits, with one trained scalar per head and distance bucket."""

import math

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import ModelConfig, RelativePositionBuckets
from pretrainax.layers.linear import normal_init
from pretrainax.layers.positions.base import AttentionPositions, Positions, PositionTerms, register_positions


@flax.struct.dataclass
class BiasTerms(PositionTerms):
    """Position terms that consist of one bias, shared by all rows and layers."""

    value: jax.Array  # [1, H, T, S] float32

    def bias(self, *_: object) -> jax.Array:
        return self.value


@register_positions(RelativePositionBuckets)
class RelativeBuckets(Positions):
    partition_rules = ((r"relative_bias/embedding", "buckets num_heads"),)

    def terms(self, places: AttentionPositions, *, causal: bool, dtype: jnp.dtype) -> BiasTerms:
        bias = RelativeBias(self.config, bidirectional=not causal, name="relative_bias")
        return BiasTerms(bias(*places.lengths, -places.before))


def relative_bucket(distance: np.ndarray, num_buckets: int, max_distance: int, bidirectional: bool) -> np.ndarray:
    """Returns the bucket of each distance (key index - query index; Raffel et al. 2020, section 2.1).

    Each direction has n buckets: the first n/2 hold a single distance each, and the rest hold ranges that grow
    logarithmically up to max_distance. The last bucket also holds all larger distances.

    Args:
      num_buckets: total number of buckets, which is 2 n if `bidirectional`, else n.
      bidirectional: if True, keys after the query have the upper n buckets; if False, keys after the query have bucket
        0.
    """
    first_bucket = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        first_bucket = num_buckets * (distance > 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = num_buckets // 2
    growth = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)  # from 0 at `exact` to 1
    # Adding 1e-6 prevents a rounding error of the logarithm from lowering an integer to the previous integer.
    ranges = exact + np.floor(growth * (num_buckets - exact) + 1e-6).astype(distance.dtype)
    return first_bucket + np.where(distance < exact, distance, np.minimum(ranges, num_buckets - 1))


class RelativeBias(nn.Module):
    """The table of T5's relative bias: one trained scalar for each head and distance bucket.

    Distances are computed from token indices in the row instead of the batch's `positions`, so that all rows can share
    one bias. Attention stays within a segment, where indices and positions give the same distances.
    """

    config: ModelConfig
    bidirectional: bool

    @nn.compact
    def __call__(self, query_length: int, key_length: int, offset: int = 0) -> jax.Array:
        """Computes the bias of T queries on S keys, [1, H, T, S] float32.

        Args:
          offset: index of the first key minus index of the first query.
        """
        config, position = self.config, self.config.position
        shape = position.num_buckets, config.num_heads
        table = self.param("embedding", normal_init(config, config.d_model), shape, jnp.float32)
        distances = offset + np.arange(1 - query_length, key_length)
        buckets = relative_bucket(distances, position.num_buckets, position.max_distance, self.bidirectional)
        # [T+S-1, H] -> [H, T, S] -> [1, H, T, S]
        return _toeplitz(table[buckets].T, query_length)[None]


def _toeplitz(values: jax.Array, query_length: int) -> jax.Array:
    """Computes out[h, q, k] = values[h, k - q + T - 1]; [H, T+S-1] -> [H, T, S].

    The computation only reshapes, because the gradient of a lookup would add T · S numbers to a few buckets one by one.
    The values are repeated with period n = T + S - 1 and read in rows of n + 1, which shifts them by one index per row.
    """
    heads, n = values.shape
    repeated = jnp.tile(values, (1, query_length + 1))[:, : query_length * (n + 1)]
    return repeated.reshape(heads, query_length, n + 1)[:, ::-1, : n + 1 - query_length]
