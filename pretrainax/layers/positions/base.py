"""The base classes of position encodings, which change the embeddings, the attention logits, or queries and keys."""

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
    """The positions of the queries and keys of self-attention."""

    queries: jax.Array  # positions of the queries in their segments, [B, T]
    before: int = 0  # number of cached tokens directly before the first query; the other keys are those of the T tokens
    reach: Optional[int] = None  # generation: maximum length of a segment, in tokens; None: segments do not grow

    @property
    def lengths(self) -> tuple[int, int]:
        """Returns the numbers of queries and keys, T and S."""
        tokens = self.queries.shape[1]
        return tokens, self.before + tokens


@flax.struct.dataclass
class PositionTerms:
    """The part of a position encoding that self-attention applies, computed once for all blocks of a stack.

    This base class changes nothing.
    """

    logit_terms: ClassVar[int] = 1  # number of terms of a logit that are about as large as q · k
    has_row_bias: ClassVar[bool] = False  # True: the bias differs between the rows of the batch

    def in_block(
        self, config: ModelConfig, is_local: jax.Array, number: jax.Array, deterministic: bool
    ) -> "PositionTerms":
        """Returns the terms of one block; a block calls this method with its flags.

        Args:
          is_local: [] bool, True in a layer with a window.
          number: [] int32, layer number from 0.
          deterministic: True disables dropout.
        """
        return self

    def bias(
        self, config: ModelConfig, q: jax.Array, k: jax.Array, to_query: nn.Module, to_key: nn.Module, scale: float
    ) -> Optional[jax.Array]:
        """Returns the bias that is added to the scaled logits, [1 or B, H, T, S] float32, or None if there is no bias.

        Args:
          q: [B, T, H, K]; k: [B, S, G, K], before norm and rotation.
          to_query, to_key: the linear layers that compute q and k.
          scale: the factor of the logits.
        """
        return None

    def rotate(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the queries [B, T, H, K] and the keys [B, S, G, K], rotated by their positions."""
        return q, k


@dataclasses.dataclass(frozen=True)
class Positions:
    """The position encoding of a model. This base class changes nothing; a subclass overrides the methods it needs."""

    config: ModelConfig

    # Rows of sharding.rules.PARTITION_RULES for the parameters of this class.
    partition_rules: ClassVar[tuple[tuple[str, str], ...]] = ()

    @property
    def logit_gain(self) -> float:
        """Returns the factor by which this encoding multiplies the attention logits."""
        return 1.0

    def embedding(self) -> Optional[nn.Module]:
        """Returns a new `position_embedding` table for an encoder or a decoder; None if the encoding has no table."""
        return None

    def embed(self, x: jax.Array, positions: jax.Array, embedding: Optional[nn.Module]) -> jax.Array:
        """Returns the token embeddings x [B, T, D] with the encoding of the positions [B, T] added.

        Args:
          embedding: the `position_embedding` table of this encoder or decoder; None if the encoding has no table.
        """
        return x

    def terms(self, places: AttentionPositions, *, causal: bool, dtype: jnp.dtype) -> PositionTerms:
        """Returns the position terms of all blocks of a stack.

        The stack calls this method, so modules that the method creates belong to the stack.

        Args:
          causal: True if no query attends to later tokens.
          dtype: of activations.
        """
        return PositionTerms()

    def flops(self, query_length: int, key_length: int) -> int:
        """Returns the floating-point operations that this encoding adds to one self-attention layer per sequence."""
        return 0


# The partition rule of `position_table`.
TABLE_RULE = (r"(decoder_)?position_embedding/embedding", "rows d_model")

_BEHAVIOURS: dict[type[Position], type[Positions]] = {}


def register_positions(kind: type[Position]) -> Callable[[type[Positions]], type[Positions]]:
    """Returns a decorator that registers a subclass of Positions, with its partition rules, for a config class."""

    def register(behaviour: type[Positions]) -> type[Positions]:
        _BEHAVIOURS[kind] = behaviour
        add_partition_rules(behaviour.partition_rules)
        return behaviour

    return register


def positions_for(config: ModelConfig) -> Positions:
    """Returns the Positions object for `config.position`.

    Raises:
      UserError: no subclass of Positions is registered for this config class.
    """
    kind = type(config.position)
    if kind not in _BEHAVIOURS:
        known = ", ".join(sorted(known.__name__ for known in _BEHAVIOURS))
        raise UserError(
            f"config.model.position is {kind.__name__}, which behaviour_of has not registered; registered: {known}"
        )
    return _BEHAVIOURS[kind](config)


def position_table(config: ModelConfig, rows: int) -> Embedding:
    """Returns a table with `rows` trained vectors, one per position, which are as wide as the token embeddings."""
    return Embedding(rows, config.embedding_width, normal_init(config, fan_in=1))
