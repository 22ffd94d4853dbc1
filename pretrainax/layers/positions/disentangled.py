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
from pretrainax.layers.rematerialization import saved_residual
from pretrainax.sharding.arrays import constrain

_BLOCK = 64  # number of queries that share a window of distances; a block of 128 moves 2 % more bytes in DeBERTa's step


@flax.struct.dataclass
class DisentangledTerms(PositionTerms):
    """The embeddings of the relative positions between T queries and S keys."""

    logit_terms: ClassVar[int] = 3  # He et al. 2020, equation 4
    has_row_bias: ClassVar[bool] = True

    relative: jax.Array  # [R, D], embeddings of the R buckets in use, from `RelativeTable`
    offset: int = flax.struct.field(pytree_node=False, default=0)  # index of the first key - of the first query

    def in_block(
        self, config: ModelConfig, is_local: bool | jax.Array, number: jax.Array, deterministic: bool
    ) -> "DisentangledTerms":
        dropout = Dropout(config.dropout_rate, deterministic=deterministic)
        return self.replace(relative=dropout(self.relative))

    def bias(
        self, config: ModelConfig, q: jax.Array, k: jax.Array, to_query: nn.Module, to_key: nn.Module, scale: float
    ) -> jax.Array:
        _, row_index = rows_by_distance(config, q.shape[1], k.shape[1], self.offset)
        positions = to_query(self.relative)[row_index], to_key(self.relative)[row_index]
        # One array of T · S numbers is smaller than the two products from which it is computed.
        return saved_residual(scale * disentangled_bias(q, k, *positions))


@register_positions(DisentangledPositions)
class Disentangled(Positions):
    partition_rules = (
        TABLE_RULE,
        (r"relative_embedding/embedding", "rows d_model"),
        (r"relative_embedding/norm/(scale|bias)", "features"),
    )

    def embedding(self) -> Optional[nn.Module]:
        """Builds the mask decoder's absolute position embeddings, or returns None if the model has no mask decoder."""
        config = self.config
        return position_table(config, config.position.max_length) if config.enhanced_mask_decoder else None

    def terms(self, places: AttentionPositions, *, causal: bool, dtype: jnp.dtype) -> DisentangledTerms:
        table = RelativeTable(self.config, name="relative_embedding")
        return DisentangledTerms(table(*places.lengths, -places.before).astype(dtype), -places.before)

    def flops(self, query_length: int, key_length: int) -> int:
        # two additional dot products for each pair of tokens: content with position, and position with content
        return 2 * 2 * query_length * key_length * self.config.num_heads * self.config.dim_per_head


def log_bucket(distance: np.ndarray, num_buckets: int, max_distance: int) -> np.ndarray:
    """Returns the table row of each distance (query index - key index), as in the code of DeBERTa v2.

    The table has 2 · num_buckets rows. Row num_buckets holds distance 0. Each direction has num_buckets rows: the first
    half hold a single distance each, and the second half hold ranges that grow logarithmically up to max_distance. The
    outermost row also holds all larger distances.
    """
    exact, magnitude = num_buckets // 2, np.abs(distance)
    growth = np.log(np.maximum(magnitude, 1) / exact) / math.log((max_distance - 1) / exact)  # from 0 at `exact` to 1
    # Subtracting 1e-6 prevents a rounding error of the logarithm from raising an integer to the next integer.
    ranges = exact + np.ceil(growth * (exact - 1) - 1e-6).astype(distance.dtype)
    bucket = np.sign(distance) * np.where(magnitude <= exact, magnitude, ranges)
    return np.clip(bucket + num_buckets, 0, 2 * num_buckets - 1)


def rows_by_distance(
    config: ModelConfig, query_length: int, key_length: int, offset: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the R table rows that T queries and S keys need, [R], and each distance's index into them, [T+S-1].

    A distance is query index - key index. The T + S - 1 distances are 1 - S, …, T - 1, each minus `offset`.

    Args:
      offset: index of the first key minus index of the first query.
    """
    position = config.position
    distances = np.arange(1 - key_length, query_length) - offset
    return np.unique(log_bucket(distances, position.num_buckets, position.max_distance), return_inverse=True)


class RelativeTable(nn.Module):
    """The table of relative-position embeddings, which all layers share.

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


@jax.named_scope("relative_logits")  # its matmuls are not attention's, which may be in a fused kernel
def disentangled_bias(q: jax.Array, k: jax.Array, position_q: jax.Array, position_k: jax.Array) -> jax.Array:
    """Computes query · position key + key · position query, before scaling: [B, H, T, S] in the dtype of q.

    With bfloat16, the array takes half the memory traffic of float32; attention adds it to float32 logits.

    Args:
      q: [B, T, H, K]; k: [B, S, H, K].
      position_q, position_k: [T+S-1, H, K], for the distances (query index - key index) 1 - S … T - 1.
    """
    chex.assert_rank((q, k), 4, custom_message="queries are [B, T, H, K], keys [B, S, H, K]")
    distances = (q.shape[1] + k.shape[1] - 1, *q.shape[2:])
    chex.assert_shape((position_q, position_k), distances, custom_message="positions are [T+S-1, H, K]")
    to_position = _relative_logits(q, position_k[::-1])  # reversed: _relative_logits uses key index - query index
    to_content = _relative_logits(k, position_q)
    # [B, H, T, S] + [B, H, S, T]ᵀ
    return to_position + to_content.swapaxes(2, 3)


def _relative_logits(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Computes out[b, h, i, j] = x[b, i, h] · positions[j - i + T - 1, h], [B, H, T, S] in the dtype of x.

    The computation uses only matmuls and reshapes, because the gradient of a lookup with T · S indices would add its
    numbers one by one. A block of C indices i needs a window of S + C - 1 distances, not all distances.

    Args:
      x: [B, T, H, K].
      positions: [T+S-1, H, K].
    """
    b, t, h, d = x.shape
    s = len(positions) + 1 - t
    c = _BLOCK if t % _BLOCK == 0 else t
    # [T+S-1, H, K] -> [T/C, S+C, H, K]; the last row of a window only aligns the matmul
    positions = jnp.pad(positions, ((0, 1), (0, 0), (0, 0)))
    windows = jnp.stack([positions[start : start + s + c] for start in range(t - c, -1, -c)])
    # The batch axes H and I lead in all arrays, so that the products of the backward read one layout of the gradient.
    blocks = x.reshape(b, t // c, c, h, d)[:, :, ::-1].transpose(3, 1, 0, 2, 4)
    products = blocks.reshape(h, t // c, b * c, d) @ windows.transpose(2, 0, 3, 1)  # [H, I, B · C, N]
    # Row r of a block has the index i = C - 1 - r, so its distances begin at column r. Reading the flat array in rows
    # that are one element longer shifts each row by one column relative to the previous row: [C, N] -> [C, N+1]
    n = products.shape[-1]
    flat = jnp.pad(products.reshape(h, t // c, b, c * n), ((0, 0), (0, 0), (0, 0), (0, c)))
    shifted = flat.reshape(h, t // c, b, c, n + 1)[..., ::-1, :s]
    return shifted.transpose(2, 0, 1, 3, 4).reshape(b, h, t, s)
