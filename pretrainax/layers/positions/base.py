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
    before: int = 0  # number of cached keys before the first query; the T tokens of the queries are the other keys
    segment_ids: Optional[jax.Array] = None  # segments of the queries, [B, T] (0: padding); None: no padding

    @property
    def lengths(self) -> tuple[int, int]:
        """Returns the numbers of queries and keys, T and S."""
        tokens = self.queries.shape[1]
        return tokens, self.before + tokens


@flax.struct.dataclass
class PositionTerms:
    """The contribution of a position encoding to self-attention, computed once for all blocks of a stack.

    This base class changes nothing.
    """

    logit_terms: ClassVar[int] = 1  # number of terms of a logit with about the magnitude of q · k
    has_row_bias: ClassVar[bool] = False  # whether the bias differs between the rows of the batch

    def in_block(
        self, config: ModelConfig, is_local: bool | jax.Array, number: jax.Array, deterministic: bool
    ) -> "PositionTerms":
        """Returns the position terms for one block. Each block calls this method with its own flags.

        Args:
          is_local: bool or [] bool, True in a layer with a window.
          number: [] int32, layer index.
          deterministic: True disables dropout.
        """
        return self

    def bias(
        self, config: ModelConfig, q: jax.Array, k: jax.Array, to_query: nn.Module, to_key: nn.Module, scale: float
    ) -> Optional[jax.Array]:
        """Returns the bias on the scaled logits, [1 or B, H, T, S] float32, or None if there is no bias.

        Args:
          q: [B, T, H, K]; k: [B, S, G, K], before norm and rotation.
          to_query, to_key: the linear layers that compute q and k.
          scale: the factor of the logits.
        """
        return None

    def rotate(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotates the queries [B, T, H, K] and the keys [B, S, G, K] by their positions."""
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
        """Builds the `position_embedding` table of an encoder or decoder, or returns None if the encoding has none."""
        return None

    def embed(self, x: jax.Array, positions: jax.Array, embedding: Optional[nn.Module]) -> jax.Array:
        """Adds the encoding of the positions [B, T] to the token embeddings x [B, T, D].

        Args:
          embedding: the `position_embedding` table of this encoder or decoder, or None if the encoding has no table.
        """
        return x

    def terms(self, places: AttentionPositions, *, causal: bool, dtype: jnp.dtype) -> PositionTerms:
        """Computes the position terms for all blocks of a stack.

        The stack calls this method, so modules created here belong to the stack.

        Args:
          places: the positions of the queries and keys.
          causal: whether attention is causal.
          dtype: dtype of the activations.
        """
        return PositionTerms()

    def flops(self, query_length: int, key_length: int) -> int:
        """Returns the number of floating-point operations that this encoding adds to one self-attention layer.

        The number is for one sequence.
        """
        return 0


# The partition rule of `position_table`.
TABLE_RULE = (r"(decoder_)?position_embedding/embedding", "rows d_model")

_ENCODINGS: dict[type[Position], type[Positions]] = {}


def register_positions(kind: type[Position]) -> Callable[[type[Positions]], type[Positions]]:
    """Returns a decorator that registers a subclass of Positions for a config class, with its partition rules."""

    def register(cls: type[Positions]) -> type[Positions]:
        _ENCODINGS[kind] = cls
        add_partition_rules(cls.partition_rules)
        return cls

    return register


def positions_for(config: ModelConfig) -> Positions:
    """Returns the Positions object for `config.position`.

    Raises:
      UserError: if no subclass of Positions is registered for this config class.
    """
    kind = type(config.position)
    if kind not in _ENCODINGS:
        names = ", ".join(sorted(cls.__name__ for cls in _ENCODINGS))
        raise UserError(
            f"config.model.position is {kind.__name__}, which no register_positions registers; registered: {names}"
        )
    return _ENCODINGS[kind](config)


def position_table(config: ModelConfig, rows: int) -> Embedding:
    """Builds a table with `rows` trained vectors, one per position, as wide as the token embeddings."""
    return Embedding(rows, config.embedding_width, normal_init(config, fan_in=1))
