"""The model registry, and the base classes of models, which embed inputs and apply heads to the last hidden states."""

import math
from typing import NamedTuple, Optional, Protocol, TypeVar, cast

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig, UserError, nearest
from pretrainax.config.model import known_families
from pretrainax.data.batch import Batch
from pretrainax.layers.block import AuxOutputs
from pretrainax.layers.compute import Compute
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.embedding import Embedding
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions import positions_for
from pretrainax.layers.sums import add_sums
from pretrainax.models.heads import heads_of
from pretrainax.models.heads.base import modules_of_heads
from pretrainax.models.outputs import Outputs
from pretrainax.models.spread import spread_sums
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.param_paths import PyTree


class AnyModel(Protocol):
    """The interface of the models that `models.build` returns: a `Model`, or an `Electra` of two `Model`s."""

    config: ModelConfig
    compute: Compute

    def init(self, rngs: PyTree, batch: Batch, *, deterministic: bool) -> dict[str, PyTree]:
        """Initializes the parameters randomly; returns {"params": tree}."""
        ...

    def apply(
        self, variables: dict[str, PyTree], batch: Batch, *, deterministic: bool, rngs: Optional[PyTree] = None
    ) -> Outputs:
        """Computes the outputs for a batch, with parameters `variables["params"]`; `deterministic` disables dropout."""
        ...


def table(config: ModelConfig, rows: int, **axes) -> Embedding:
    """Builds an embedding table [rows, config.embedding_width]; `axes` are additional arguments of `Embedding`."""
    return Embedding(rows, config.embedding_width, normal_init(config, fan_in=1), **axes)


def token_table(config: ModelConfig) -> Embedding:
    """Builds the embedding table of the input tokens, [vocab_size, config.embedding_width]."""
    return table(config, config.vocab_size, axes=("vocab_size", "d_model"))


class Flops(NamedTuple):
    """Forward FLOPs of one example, excluding the attention matmuls over query-key pairs."""

    blocks: float  # FLOPs in the blocks
    outside_blocks: float  # FLOPs before and after the blocks


class AnyFamily(nn.Module):
    """Base class of model families. A subclass defines `__call__(batch, *, deterministic) -> Outputs`."""

    config: ModelConfig
    compute: Compute

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        """Checks whether this class implements the model of `config`."""
        raise NotImplementedError

    @staticmethod
    def flops(config: ModelConfig, inputs: int, targets: int) -> Optional[Flops]:
        """Computes the forward FLOPs of one example, for a model that is not built from `pretrainax.layers.block`.

        Args:
          inputs, targets: tokens per example, as in `models.flops.flops_per_step`.

        Returns:
          The FLOPs, or None for a model that is built from these blocks, because `models.flops` then computes the
          FLOPs.
        """
        return None


class Model(AnyFamily):
    """Base class of this package's model families. Defines embeddings and heads; subclasses define stacks of blocks."""

    def setup(self):
        config = self.config
        self.token_embedding = token_table(config)
        self.position_embedding = positions_for(config).embedding()
        if config.num_token_types:
            self.token_type_embedding = table(config, config.num_token_types)
        if config.embedding_norm:
            self.embedding_norm = Norm(config)
        if config.embedding_dim:
            init = normal_init(config, config.embedding_dim)
            self.embedding_projection = Linear((config.d_model,), ("features", "d_model"), init)
        heads = modules_of_heads(config)
        for name, module in heads.items():
            setattr(self, name, module)
        self.names_of_heads = tuple(heads)
        self.dropout = Dropout(config.dropout_rate)

    @property
    def output_embedding(self) -> Embedding:
        """Returns the token embedding table to which the output matrix may be tied.

        With `separate_embeddings`, this is the decoder's table. Otherwise, the model has only one token table.
        """
        return self.decoder_token_embedding if self.config.separate_embeddings else self.token_embedding

    def embed(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        token_types: Optional[jax.Array] = None,
        *,
        side: str = "",
        deterministic: bool,
    ) -> jax.Array:
        """Computes the input of the first block, [B, T] -> [B, T, D]: the sum of token, position and type embeddings.

        With `embedding_norm`, the sum is normalized. With `embedding_dim`, it is projected to width D after dropout.

        Args:
          token_types: [B, T]. If None, all tokens have type 0.
          side: "decoder_" selects the decoder's position table and norm and, with `separate_embeddings`, the decoder's
            token table. "" selects the tables of the encoder, or of the only stack.
          deterministic: disables dropout.
        """
        config = self.config.last_stack if side else self.config
        inputs = (tokens, positions) if token_types is None else (tokens, positions, token_types)
        chex.assert_rank(inputs, 2, custom_message="tokens, positions and token_types are [B, T]")
        chex.assert_equal_shape(inputs, custom_message="tokens, positions and token_types are [B, T]")
        x = (self.output_embedding if side else self.token_embedding)(tokens)
        if config.scale_embeddings:
            x *= math.sqrt(config.d_model)
        x = positions_for(config).embed(x, positions, getattr(self, f"{side}position_embedding"))
        if config.num_token_types:
            x += self.token_type_embedding(jnp.zeros_like(tokens) if token_types is None else token_types)
        x = constrain(x).astype(self.compute.dtype)
        if config.embedding_norm:
            x = getattr(self, f"{side}embedding_norm")(x)
        x = self.dropout(x, deterministic=deterministic)
        # [B, T, E] -> [B, T, D]
        return self.embedding_projection(x) if config.embedding_dim else x

    def absolute(self, positions: jax.Array) -> jax.Array:
        """Computes the absolute position embeddings for an enhanced mask decoder (DeBERTa), [B, T] -> [B, T, D]."""
        assert self.position_embedding is not None  # an enhanced mask decoder requires position embeddings
        x = constrain(self.position_embedding(positions)).astype(self.compute.dtype)
        # [B, T, E] -> [B, T, D]
        return self.embedding_projection(x) if self.config.embedding_dim else x

    def head_outputs(self, x: jax.Array, side: AuxOutputs, batch: Batch, *, deterministic: bool) -> Outputs:
        """Applies all heads to the last hidden states; returns their outputs with the blocks' auxiliary outputs.

        Args:
          x: the last hidden states, [B, T, D].
          side: the auxiliary outputs of the blocks: metric sums, and state such as a KV cache.
          deterministic: disables dropout, and without state adds the spread of states and predictions to the sums.
        """
        outputs, sums = {}, side.sums
        for head in heads_of(self.config):
            outputs[head.name] = head.output(self, x, batch, deterministic=deterministic)
            sums = add_sums(sums, head.block_sums(outputs[head.name]))
        if deterministic and side.state is None:  # in neither training, which it would slow down, nor generation
            sums = add_sums(sums, spread_sums(x, outputs, batch))
        return Outputs(outputs, sums, side.state)


MODELS: list[type[AnyFamily]] = []
_Class = TypeVar("_Class", bound=type)


def register_model(cls: _Class) -> _Class:
    """Registers a model family, as a class decorator; it takes precedence over previously registered families."""
    MODELS.insert(0, cast(type[AnyFamily], cls))
    return cls


def model_of(config: ModelConfig) -> type[AnyFamily]:
    """Returns the registered model class that implements the model of a config.

    Raises:
      UserError: no registered class implements this model.
    """
    model_class = next((cls for cls in MODELS if cls.is_in(config)), None)
    if model_class is None:
        raise UserError(f"config.model.family is {config.family!r}, {nearest(config.family, known_families())}")
    return model_class
