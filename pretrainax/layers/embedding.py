"""A table of vectors, looked up by an id."""

from typing import Any, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.sharding import constrain


class Embedding(nn.Module):
    """Row ids[b, t] of `embedding` [rows, D]. Ids are in range: `validate` and `check_batch` see to it."""

    rows: int
    features: int
    embedding_init: Any
    rows_split_by: Optional[str] = None  # the mesh axis that splits the rows

    def setup(self):
        self.embedding = self.param("embedding", self.embedding_init, (self.rows, self.features), jnp.float32)

    def __call__(self, ids: jax.Array) -> jax.Array:
        # With fsdp a device holds a part of each vector: the table is gathered, so that the ids need not be.
        table = constrain(self.embedding, P(self.rows_split_by, None))
        # [B, T] -> [B, T, D]
        return jnp.take(table, ids, axis=0, mode="clip")
