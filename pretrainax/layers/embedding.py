"""A table of vectors, looked up by an id."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Embedding(nn.Module):
    """Row ids[b, t] of `embedding` [rows, D] for each position. Ids are in range: `check_batch` looks after that."""

    rows: int
    features: int
    embedding_init: Any

    def setup(self):
        self.embedding = self.param("embedding", self.embedding_init, (self.rows, self.features), jnp.float32)

    def __call__(self, ids: jax.Array) -> jax.Array:
        # [B, T] -> [B, T, D]
        return jnp.take(self.embedding, ids, axis=0, mode="clip")
