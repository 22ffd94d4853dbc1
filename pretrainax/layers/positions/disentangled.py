"""Disentangled attention, whose logits combine the contents and the positions of tokens (He et al. 2020, section 3.1).

    logits[q, k] = scale · (query[q] · key[k] + query[q] · position_key[d] + key[k] · position_query[d])

d is the bucket of the distance q - k. Position keys and position queries are computed from one table of position
embeddings, with the same projections as keys and queries (DeBERTa v2; the first DeBERTa had separate projections). The
last two terms are a bias on the logits, which differs between the rows of a batch.
"""

import math
from typing import ClassVar, Optional

import chex
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pretrainax.config import DisentangledPositions, ModelConfig
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.linear import normal_init
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions.base import (
    TABLE_RULE,
    AttentionPositions,
    Positions,
    PositionTerms,
    position_table,
    register_positions,
)
from pretrainax.sharding.arrays import constrain

_BLOCK = 128  # number of queries that share a window of distances


@flax.struct.dataclass
class DisentangledTerms(PositionTerms):
    """The embeddings of the relative positions between T queries and S keys."""

    logit_terms: ClassVar[int] = 3  # He et al. 2020, equation 4
    has_row_bias: ClassVar[bool] = True

    relative: jax.Array  # [R, D], embeddings of the R buckets that occur, from `RelativeTable`
    offset: int = flax.struct.field(pytree_node=False, default=0)  # index of the first key - of the first query

    def in_block(
        self, config: ModelConfig, is_local: jax.Array, number: jax.Array, deterministic: bool
    ) -> "DisentangledTerms":
        dropout = Dropout(config.dropout_rate, deterministic=deterministic)
        return self.replace(relative=dropout(self.relative))

    def bias(
        self, config: ModelConfig, q: jax.Array, k: jax.Array, to_query: nn.Module, to_key: nn.Module, scale: float
    ) -> jax.Array:
        _, which = rows_by_distance(config, q.shape[1], k.shape[1], self.offset)
        return scale * disentangled_bias(q, k, to_query(self.relative)[which], to_key(self.relative)[which])


@register_positions(DisentangledPositions)
class Disentangled(Positions):
    partition_rules = (
        TABLE_RULE,
        (r"relative_embedding/embedding", "rows d_model"),
        (r"relative_embedding/norm/(scale|bias)", "features"),
    )

    def embedding(self) -> Optional[nn.Module]:
        """Returns the table of absolute positions for the mask decoder, or None for a model without a mask decoder."""
        config = self.config
        return position_table(config, config.position.max_length) if config.enhanced_mask_decoder else None

    def terms(self, places: AttentionPositions, *, causal: bool, dtype: jnp.dtype) -> DisentangledTerms:
        table = RelativeTable(self.config, name="relative_embedding")
        return DisentangledTerms(table(*places.lengths, -places.before).astype(dtype), -places.before)

    def flops(self, query_length: int, key_length: int) -> int:
        # two more products for each pair of tokens: content with position, and position with content
        return 2 * 2 * query_length * key_length * self.config.num_heads * self.config.dim_per_head


def log_bucket(distance: np.ndarray, num_buckets: int, max_distance: int) -> np.ndarray:
    """Returns the table row of each distance (query's index - key's index), as in the code of DeBERTa v2.

    The table has 2 · num_buckets rows. Row num_buckets is distance 0. Each direction has num_buckets rows: the first
    half for single distances, the second half for ranges that grow logarithmically up to max_distance. The last row is
    for all larger distances.
    """
    exact, size = num_buckets // 2, np.abs(distance)
    growth = np.log(np.maximum(size, 1) / exact) / math.log((max_distance - 1) / exact)  # from 0 at `exact` to 1
    # Subtracting 1e-6 prevents a rounding error of the logarithm from raising an integer to the next integer.
    ranges = exact + np.ceil(growth * (exact - 1) - 1e-6).astype(distance.dtype)
    bucket = np.sign(distance) * np.where(size <= exact, size, ranges)
    return np.clip(bucket + num_buckets, 0, 2 * num_buckets - 1)


def rows_by_distance(
    config: ModelConfig, query_length: int, key_length: int, offset: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the R table rows that T queries and S keys need, and the index of each distance's row among these R rows.

    The distances are the query's index - the key's index, in the order 1 - S, …, T - 1, minus `offset`: [T+S-1].

    Args:
      offset: index of the first key - index of the first query.
    """
    position = config.position
    distances = np.arange(1 - key_length, query_length) - offset
    return np.unique(log_bucket(distances, position.num_buckets, position.max_distance), return_inverse=True)


class RelativeTable(nn.Module):
    """The table of the embeddings of relative positions, which all layers share.

    A call returns the R normalized embeddings that T queries and S keys need, [R, D].
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, query_length: int, key_length: int, offset: int = 0) -> jax.Array:
        config = self.config
        shape = 2 * config.position.num_buckets, config.d_model
        table = self.param("embedding", normal_init(config, fan_in=1), shape, jnp.float32)
        rows, _ = rows_by_distance(config, query_length, key_length, offset)
        return Norm(config, name="norm")(constrain(table, P())[rows])


def disentangled_bias(q: jax.Array, k: jax.Array, position_q: jax.Array, position_k: jax.Array) -> jax.Array:
    """Computes query · position key + key · position query, before scaling: [B, H, T, S] float32.

    Args:
      q: [B, T, H, K]; k: [B, S, H, K].
      position_q, position_k: [T+S-1, H, K], for the distances (query's index - key's index) 1 - S … T - 1.
    """
    chex.assert_rank((q, k), 4, custom_message="queries are [B, T, H, K], keys [B, S, H, K]")
    distances = (q.shape[1] + k.shape[1] - 1, *q.shape[2:])
    chex.assert_shape((position_q, position_k), distances, custom_message="positions are [T+S-1, H, K]")
    to_position = _by_index(q, position_k[::-1])  # reversed, because _by_index uses the key's index - the query's index
    to_content = _by_index(k, position_q)
    # [B, H, T, S] + [B, H, S, T]ᵀ
    return to_position + to_content.swapaxes(2, 3)


def _by_index(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns out[b, h, i, j] = x[b, i, h] · positions[j - i + T - 1, h], [B, H, T, S] float32.

    The computation uses only products and reshapes, because the gradient of a lookup with T · S indices would add its
    numbers one by one. A block of C indices i needs a window of S + C - 1 distances, not all distances.

    Args:
      x: [B, T, H, K].
      positions: [T+S-1, H, K].
    """
    b, t, h, d = x.shape
    s = len(positions) + 1 - t
    c = _BLOCK if t % _BLOCK == 0 else t
    # [T+S-1, H, K] -> [T/C, S+C, H, K]; the last row of a window only completes the shape
    positions = jnp.pad(positions, ((0, 1), (0, 0), (0, 0)))
    windows = jnp.stack([positions[start : start + s + c] for start in range(t - c, -1, -c)])
    products = jnp.einsum(
        "BICHK,INHK->BHICN", x.reshape(b, t // c, c, h, d), windows, preferred_element_type=jnp.float32
    )
    # Reading the flat array in rows that are one element shorter shifts each row by one column more than the previous
    # row: [C, S+C] -> [C, S+C-1] -> [C, S]
    flat = products.reshape(b, h, t // c, c * (s + c))[..., c - 1 : c - 1 + c * (s + c - 1)]
    return flat.reshape(b, h, t // c, c, s + c - 1)[..., :s].reshape(b, h, t, s)
