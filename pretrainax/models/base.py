"""What the three families share: embeddings in, output matrix out."""

from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import LearnedPositions, ModelConfig, SinusoidalPositions
from pretrainax.layers.compute import Compute
from pretrainax.layers.embedding import Embedding
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.mlp import ACTIVATIONS
from pretrainax.layers.norm import Norm
from pretrainax.layers.position import sinusoidal
from pretrainax.models.outputs import Outputs
from pretrainax.sharding import constrain

Batch = dict[str, jax.Array]


class MaskedLMHead(nn.Module):
    """norm(activation(dense(x))), before the output matrix (Devlin et al. 2018, in the released code)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        init = normal_init(config, config.d_model)
        x = Linear((config.d_model,), ("d_model", "features"), init, config.use_bias, name="dense")(x)
        return Norm(config, name="norm")(ACTIVATIONS[config.activation](x))


class Unembedding(nn.Module):
    """The output matrix, tied to the token embedding or its own, and the bias of a masked LM."""

    config: ModelConfig

    @nn.compact
    def __call__(self, features: jax.Array, token_embedding: jax.Array) -> Outputs:
        config = self.config
        vocabulary = (config.vocab_size,)
        bias = self.param("bias", nn.initializers.zeros, vocabulary, jnp.float32) if config.masked_lm_head else None
        if config.tie_embeddings:
            if config.scale_tied_logits:
                features = features * config.d_model**-0.5
            return Outputs(features, token_embedding.T, bias)
        init = normal_init(config, config.d_model)
        return Outputs(features, self.param("kernel", init, (config.d_model, *vocabulary), jnp.float32), bias)


class Model(nn.Module):
    """A family adds its stacks, and `__call__(batch, *, deterministic) -> Outputs`."""

    config: ModelConfig
    compute: Compute

    def setup(self):
        config = self.config

        def table(rows, **split):
            return Embedding(rows, config.d_model, normal_init(config, fan_in=1), **split)

        self.token_embedding = table(config.vocab_size, rows_split_by="tensor")
        if isinstance(config.position, LearnedPositions):
            self.position_embedding = table(config.position.max_length)
        if config.num_token_types:
            self.token_type_embedding = table(config.num_token_types)
        if config.embedding_norm:
            self.embedding_norm = Norm(config)
        if config.masked_lm_head:
            self.masked_lm_head = MaskedLMHead(config)
        self.unembedding = Unembedding(config)
        self.dropout = nn.Dropout(config.dropout_rate)

    def embed(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        token_types: Optional[jax.Array] = None,
        *,
        deterministic: bool,
    ) -> jax.Array:
        """The sum of a token's embeddings, [B, T] -> [B, T, D]. Without `token_types` all are of type 0."""
        config = self.config
        x = self.token_embedding(tokens)
        if isinstance(config.position, LearnedPositions):
            x += self.position_embedding(positions)
        if isinstance(config.position, SinusoidalPositions):
            x += sinusoidal(positions, config.d_model)
        if config.num_token_types:
            x += self.token_type_embedding(jnp.zeros_like(tokens) if token_types is None else token_types)
        if config.embedding_norm:
            x = self.embedding_norm(x)
        return self.dropout(constrain(x).astype(self.compute.dtype), deterministic=deterministic)

    def predict(self, features: jax.Array) -> Outputs:
        """[B, N, D] -> what gives the logits over the vocabulary."""
        if self.config.masked_lm_head:
            features = self.masked_lm_head(features)
        return self.unembedding(features, self.token_embedding.embedding)
