"""Learned positions: one trained vector per position, added to the token embeddings."""

import flax.linen as nn
import jax

from pretrainax.config import LearnedPositions
from pretrainax.layers.positions.base import TABLE_RULE, Positions, position_table, register_positions


@register_positions(LearnedPositions)
class Learned(Positions):
    partition_rules = (TABLE_RULE,)

    def embedding(self) -> nn.Module:
        position = self.config.position
        return position_table(self.config, position.max_length + position.offset)

    def embed(self, x: jax.Array, positions: jax.Array, embedding: nn.Module) -> jax.Array:
        return x + embedding(positions + self.config.position.offset)
