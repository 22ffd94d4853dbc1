"""What the three families share: embeddings in, output matrix out."""

import math
from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.config import ModelConfig
from pretrainax.layers.compute import Compute
from pretrainax.layers.embedding import Embedding
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.mlp import ACTIVATIONS
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions import positions_of
from pretrainax.models.outputs import Outputs
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.mesh import BATCH_AXES

Batch = dict[str, jax.Array]


class MaskedLMHead(nn.Module):
    """norm(activation(dense(x))), before the output matrix (Devlin et al. 2018, in the released code).

    [B, N, D] -> [B, N, E], E the width of the embeddings.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        init = normal_init(config, config.d_model)
        x = Linear((config.embedding_width,), ("d_model", "features"), init, config.use_bias, name="dense")(x)
        return Norm(config, name="norm")(ACTIVATIONS[config.activation](x))


class PairHead(nn.Module):
    """Do two segments belong together? From the first token, [B, T, D] -> [B, 2] float32.

    BERT asks whether the second follows the first (Devlin et al. 2018, section 3.1, task 2), ALBERT whether they are
    in order (Lan et al. 2019, section 3.1).
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, init = self.config.d_model, normal_init(self.config, self.config.d_model)
        x = constrain(x[:, 0], P(BATCH_AXES))  # [B, T, D] -> [B, D]
        x = constrain(jnp.tanh(Linear((width,), ("d_model", "features"), init, name="dense")(x)), P(BATCH_AXES))
        return Linear((2,), ("d_model", "labels"), init, name="output")(x).astype(jnp.float32)


class ReplacedTokenHead(nn.Module):
    """Was the token replaced? [B, T, D] -> [B, T] float32 (Clark et al. 2020, section 2; the layer before the last is
    in the released code, and so is DeBERTa v3's sum with the first token of the segment)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: jax.Array) -> jax.Array:
        config, init = self.config, normal_init(self.config, self.config.d_model)
        if config.replaced_token_context:
            x = Norm(config, name="norm")(x + _first_of_segment(x, segment_ids))
        x = Linear((config.d_model,), ("d_model", "features"), init, name="dense")(x)
        x = Linear((1,), ("d_model", "labels"), init, name="output")(ACTIVATIONS[config.activation](x))
        return x[..., 0].astype(jnp.float32)  # [B, T, 1] -> [B, T]


def _first_of_segment(x: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """out[b, t] is x of the first token of t's segment, [B, T, D] -> [B, T, D]."""
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    first = jax.lax.cummax(jnp.where(starts, jnp.arange(x.shape[1])[None], 0), axis=1)
    # A product and no lookup, whose gradient would add a whole segment up in one place, token by token.
    return jnp.einsum("BTS,BSD->BTD", jax.nn.one_hot(first, x.shape[1], dtype=x.dtype), x)


class LMHead(nn.Module):
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
            matrix = token_embedding.T
        else:
            init = normal_init(config, config.d_model)
            matrix = self.param("kernel", init, (config.d_model, *vocabulary), jnp.float32)
        return Outputs(features, matrix, bias, config.final_logit_cap)


class Model(nn.Module):
    """A family adds its stacks, and `__call__(batch, *, deterministic) -> Outputs`."""

    config: ModelConfig
    compute: Compute

    def setup(self):
        config = self.config
        self.token_embedding = self.table(config.vocab_size, rows_split_by="tensor")
        self.positions = positions_of(config)
        self.position_embedding = self.positions.embedding()
        if config.num_token_types:
            self.token_type_embedding = self.table(config.num_token_types)
        if config.embedding_norm:
            self.embedding_norm = Norm(config)
        if config.embedding_dim:
            init = normal_init(config, config.embedding_dim)
            self.embedding_projection = Linear((config.d_model,), ("embedding_dim", "d_model"), init)
        if config.masked_lm_head:
            self.masked_lm_head = MaskedLMHead(config)
        self.unembedding = LMHead(config)
        self.dropout = nn.Dropout(config.dropout_rate)

    def table(self, rows: int, **split) -> Embedding:
        return Embedding(rows, self.config.embedding_width, normal_init(self.config, fan_in=1), **split)

    def embed(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        token_types: Optional[jax.Array] = None,
        *,
        side: str = "",
        deterministic: bool,
    ) -> jax.Array:
        """The sum of a token's embeddings, [B, T] -> [B, T, D]. Without `token_types` all are of type 0.

        `side` is "decoder_" where positions and norm are not those of the encoder.
        """
        config = self.config
        x = self.token_embedding(tokens)
        if config.scale_embeddings:
            x *= math.sqrt(config.d_model)
        x = self.positions.embed(x, positions, getattr(self, f"{side}position_embedding"))
        if config.num_token_types:
            x += self.token_type_embedding(jnp.zeros_like(tokens) if token_types is None else token_types)
        if config.embedding_norm:
            x = getattr(self, f"{side}embedding_norm")(x)
        x = self.dropout(constrain(x).astype(self.compute.dtype), deterministic=deterministic)
        # [B, T, E] -> [B, T, D]
        return self.embedding_projection(x) if config.embedding_dim else x

    def absolute(self, positions: jax.Array) -> jax.Array:
        """What a mask decoder is told about where a token stands, [B, T] -> [B, T, D]."""
        x = constrain(self.position_embedding(positions)).astype(self.compute.dtype)
        # [B, T, E] -> [B, T, D]
        return self.embedding_projection(x) if self.config.embedding_dim else x

    def predict(self, features: jax.Array) -> Outputs:
        """[B, N, D] -> what gives the logits over the vocabulary."""
        if self.config.masked_lm_head:
            features = self.masked_lm_head(features)
        return self.unembedding(features, self.token_embedding.embedding)
