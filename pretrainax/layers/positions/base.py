"""The base of all kinds of positions: they add to the embeddings, add a bias to the logits, rotate queries and keys."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Optional

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig, Position, UserError
from pretrainax.layers.embedding import Embedding
from pretrainax.layers.linear import normal_init
from pretrainax.sharding.rules import add_partition_rules


class Places(NamedTuple):
    """Says where the queries and the keys of a self-attention stand."""

    queries: jax.Array  # positions [B, T]
    before: int = 0  # tokens right before the first query, whose keys are there already; the others are of the queries
    reach: Optional[int] = None  # tokens that the longest text may grow to; None: no text is longer than it is here

    @property
    def lengths(self) -> tuple[int, int]:
        """Returns T and S."""
        tokens = self.queries.shape[1]
        return tokens, self.before + tokens


@flax.struct.dataclass
class PositionTerms:
    """Does the part of positions inside self-attention, computed once for all blocks of a stack: here, nothing."""

    logit_terms: ClassVar[int] = 1  # terms of a logit, each of the size of q · k
    has_row_bias: ClassVar[bool] = False  # the bias is another one for each row of the batch

    def in_block(
        self, config: ModelConfig, is_local: jax.Array, number: jax.Array, deterministic: bool
    ) -> "PositionTerms":
        """Returns the terms of one block, called inside it; `is_local` is a [] bool, `number` [] int32, from 0."""
        return self

    def bias(
        self, config: ModelConfig, q: jax.Array, k: jax.Array, to_query: nn.Module, to_key: nn.Module, scale: float
    ) -> Optional[jax.Array]:
        """Returns what is added to the scaled logits, [1 or B, H, T, S] float32, or None for nothing.

        Args:
          q: [B, T, H, K]; k: [B, S, G, K], before norm and rotation.
          to_query, to_key: the maps that made them.
          scale: of the logits.
        """
        return None

    def rotate(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns queries [B, T, H, K] and keys [B, S, G, K] turned by their positions."""
        return q, k


@dataclasses.dataclass(frozen=True)
class Positions:
    """Does what the positions of a model do. A kind overrides what it does; this one does nothing."""

    config: ModelConfig

    # Rows for sharding.rules.PARTITION_RULES: of the parameters that this kind brings along.
    partition_rules: ClassVar[tuple[tuple[str, str], ...]] = ()

    @property
    def logit_gain(self) -> float:
        """Returns what logits of attention are multiplied by."""
        return 1.0

    def embedding(self) -> Optional[nn.Module]:
        """Returns the table that each side of the model has under the name of `position_embedding`, if any."""
        return None

    def embed(self, x: jax.Array, positions: jax.Array, embedding: Optional[nn.Module]) -> jax.Array:
        """Returns embeddings of tokens [B, T, D] that know their positions [B, T]; `embedding` is that of the side."""
        return x

    def terms(self, places: Places, *, causal: bool, dtype: jnp.dtype) -> PositionTerms:
        """Returns what the blocks of a stack need, called inside the stack: its modules become the stack's.

        Args:
          causal: no query looks ahead.
          dtype: of activations.
        """
        return PositionTerms()

    def flops(self, query_length: int, key_length: int) -> int:
        """Returns the floating-point operations that positions add to one self-attention of one example."""
        return 0


# The row of what `position_table` returns.
TABLE_RULE = (r"(decoder_)?position_embedding/embedding", "rows d_model")

_BEHAVIOURS: dict[type[Position], type[Positions]] = {}


def behaviour_of(kind: type[Position]) -> Callable[[type[Positions]], type[Positions]]:
    """Ties a class of Positions to the config that asks for it, and adds its partition rules to the table."""

    def register(behaviour: type[Positions]) -> type[Positions]:
        _BEHAVIOURS[kind] = behaviour
        add_partition_rules(behaviour.partition_rules)
        return behaviour

    return register


def positions_of(config: ModelConfig) -> Positions:
    """Returns what `config.position` does; UserError for a kind that nothing was tied to."""
    kind = type(config.position)
    if kind not in _BEHAVIOURS:
        known = ", ".join(sorted(known.__name__ for known in _BEHAVIOURS))
        raise UserError(f"config.model.position is {kind.__name__}, for which there is no behaviour_of; known: {known}")
    return _BEHAVIOURS[kind](config)


def position_table(config: ModelConfig, rows: int) -> Embedding:
    """Returns a table of one trained vector a position, as wide as the embeddings of tokens."""
    return Embedding(rows, config.embedding_width, normal_init(config, fan_in=1))
