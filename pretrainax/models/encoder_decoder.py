"""Encoder-decoder Transformer: a decoder with cross-attention to an encoder (Vaswani et al. 2017; T5)."""

import dataclasses

import jax

from pretrainax.config import ModelConfig
from pretrainax.data.batch import Batch, segments_of
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions import positions_for
from pretrainax.layers.stack import EncoderOutput, Stack
from pretrainax.layers.sums import add_sums
from pretrainax.models.base import Model, register_model, token_table
from pretrainax.models.outputs import Outputs
from pretrainax.models.spread import HIDDEN_SPREAD, hidden_spread
from pretrainax.sharding.param_paths import PyTree


@register_model
class EncoderDecoder(Model):
    """An encoder-decoder Transformer.

    Encoder and decoder share the token embedding, unless `separate_embeddings` is set. Learned position embeddings and
    embedding norms are separate, as in the released code of BART (Lewis et al. 2019). Segment i of the decoder attends
    to segment i of the encoder.
    """

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return config.family == "encoder_decoder"

    def setup(self):
        super().setup()
        encoder, decoder = self.config.stacks.values()
        if self.config.separate_embeddings:
            self.decoder_token_embedding = token_table(decoder)
        self.decoder_position_embedding = positions_for(decoder).embedding()
        if decoder.embedding_norm:
            self.decoder_embedding_norm = Norm(decoder)
        self.encoder = Stack(encoder, self.compute, causal=False, num_layers=encoder.num_layers)
        self.decoder = Stack(decoder, self.compute, causal=True, num_layers=decoder.num_layers)

    def __call__(self, batch: Batch, *, deterministic: bool) -> Outputs:
        encoded = self.encode(batch, deterministic=deterministic)
        outputs = self.decode(batch, encoded, deterministic=deterministic)
        if not deterministic:
            return outputs
        assert encoded.x is not None  # only cached generation has no encoder states
        spread = hidden_spread(f"encoder_{HIDDEN_SPREAD}", encoded.x, batch["encoder_segment_ids"])
        return dataclasses.replace(outputs, sums=outputs.sums | spread)

    def encode(self, batch: Batch, *, deterministic: bool) -> EncoderOutput:
        """Computes the encoder's output for the `encoder_tokens` of a batch; called once per batch in generation."""
        positions, segment_ids = batch["encoder_positions"], segments_of(batch, "encoder_")
        x = self.embed(batch["encoder_tokens"], positions, deterministic=deterministic)
        x, side_outputs = self.encoder(x, positions, segment_ids, deterministic=deterministic)
        return EncoderOutput(self._drop(x, deterministic), segment_ids, side_outputs.sums)

    def decode(self, batch: Batch, encoded: EncoderOutput, state: PyTree = None, *, deterministic: bool) -> Outputs:
        """Computes the outputs for each target token, and the updated `state` of the decoder's blocks.

        Args:
          encoded: the result of `encode`.
          state: the state of the decoder's blocks, such as a KV cache, stacked as [L, …]. None if the blocks have no
            state.
          deterministic: disables dropout.
        """
        x, side_outputs = self.decoder(
            self.embed(batch["tokens"], batch["positions"], side="decoder_", deterministic=deterministic),
            batch["positions"],
            segments_of(batch),
            encoded=encoded,
            state=state,
            deterministic=deterministic,
        )
        all_side_outputs = dataclasses.replace(side_outputs, sums=add_sums(encoded.sums, side_outputs.sums))
        return self.head_outputs(self._drop(x, deterministic), all_side_outputs, batch, deterministic=deterministic)

    def _drop(self, x: jax.Array, deterministic: bool) -> jax.Array:
        # Like T5, applies dropout after the final norm (Raffel et al. 2020, section 2.1).
        return x if self.config.norm_at == "post" else self.dropout(x, deterministic=deterministic)
