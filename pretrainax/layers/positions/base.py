"""The base classes of position encodings, which change the embeddings, the logits, or queries and keys."""

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


class AttentionPositions(NamedTuple):
    """The positions of the queries and keys of a self-attention."""

    queries: jax.Array  # positions [B, T]
    before: int = 0  # number of cached tokens right before the first query; the other keys are the queries' tokens
    reach: Optional[int] = None  # maximum length of the segments, in tokens; None: no segment grows

    @property
    def lengths(self) -> tuple[int, int]:
        """Returns T and S, the numbers of queries and keys."""
        tokens = self.queries.shape[1]
        return tokens, self.before + tokens


@flax.struct.dataclass
class PositionTerms:
    """The part of a position encoding inside self-attention, computed once for all blocks of a stack.

    This base class does nothing.
    """

    logit_terms: ClassVar[int] = 1  # terms of a logit, each of the size of q · k
    has_row_bias: ClassVar[bool] = False  # the bias differs between the rows of the batch

    def in_block(
        self, config: ModelConfig, is_local: jax.Array, number: jax.Array, deterministic: bool
    ) -> "PositionTerms":
        """Returns the terms of one block; called inside it. `is_local` is [] bool, `number` is [] int32, from 0."""
        return self

    def bias(
        self, config: ModelConfig, q: jax.Array, k: jax.Array, to_query: nn.Module, to_key: nn.Module, scale: float
    ) -> Optional[jax.Array]:
        """Returns the bias of the scaled logits, [1 or B, H, T, S] float32, or None.

        Args:
          q: [B, T, H, K]; k: [B, S, G, K], before norm and rotation.
          to_query, to_key: the maps that compute them.
          scale: of the logits.
        """
        return None

    def rotate(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns queries [B, T, H, K] and keys [B, S, G, K] rotated by their positions."""
        return q, k


@dataclasses.dataclass(frozen=True)
class Positions:
    """The position encoding of a model. A subclass overrides the methods it needs; this base class does nothing."""

    config: ModelConfig

    # Rows of sharding.rules.PARTITION_RULES for the parameters of this class.
    partition_rules: ClassVar[tuple[tuple[str, str], ...]] = ()

    @property
    def logit_gain(self) -> float:
        """Returns the factor of the attention logits."""
        return 1.0

    def embedding(self) -> Optional[nn.Module]:
        """Returns the `position_embedding` table that the encoder and the decoder each have, or None."""
        return None

    def embed(self, x: jax.Array, positions: jax.Array, embedding: Optional[nn.Module]) -> jax.Array:
        """Adds positions [B, T] to token embeddings [B, T, D].

        Args:
          embedding: the `position_embedding` table of this encoder or decoder.
        """
        return x

    def terms(self, places: AttentionPositions, *, causal: bool, dtype: jnp.dtype) -> PositionTerms:
        """Returns the position terms of a stack's blocks; called inside the stack, which owns the modules.

        Args:
          causal: no query sees later tokens.
          dtype: of activations.
        """
        return PositionTerms()

    def flops(self, query_length: int, key_length: int) -> int:
        """Returns the floating-point operations that positions add to one self-attention of one example."""
        return 0


# The partition rule of `position_table`.
TABLE_RULE = (r"(decoder_)?position_embedding/embedding", "rows d_model")

_BEHAVIOURS: dict[type[Position], type[Positions]] = {}


def register_positions(kind: type[Position]) -> Callable[[type[Positions]], type[Positions]]:
    """Registers a subclass of Positions for a config class, and its partition rules."""

    def register(behaviour: type[Positions]) -> type[Positions]:
        _BEHAVIOURS[kind] = behaviour
        add_partition_rules(behaviour.partition_rules)
        return behaviour

    return register


def positions_for(config: ModelConfig) -> Positions:
    """Returns the behaviour of `config.position`.

    Raises:
      UserError: no class is registered for this config.
    """
    kind = type(config.position)
    if kind not in _BEHAVIOURS:
        known = ", ".join(sorted(known.__name__ for known in _BEHAVIOURS))
        raise UserError(
            f"config.model.position is {kind.__name__}, which behaviour_of has not registered; registered: {known}"
        )
    return _BEHAVIOURS[kind](config)


def position_table(config: ModelConfig, rows: int) -> Embedding:
    """Returns a table of one trained vector per position, as wide as the token embeddings."""
    return Embedding(rows, config.embedding_width, normal_init(config, fan_in=1))
