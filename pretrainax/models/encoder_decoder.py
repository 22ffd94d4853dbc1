"""Encoder-decoder: a decoder that also reads an encoded text (Vaswani et al. 2017; T5)."""

from pretrainax.layers.norm import Norm
from pretrainax.layers.stack import Stack
from pretrainax.models.base import Batch, Model
from pretrainax.models.outputs import Outputs


class EncoderDecoder(Model):
    """Both sides share the embedding of tokens; learned positions and an embedding norm are each side's own (Lewis et
    al. 2019, in the released code). Segment i of the decoder reads segment i of the encoder."""

    def setup(self):
        super().setup()
        config = self.config
        self.decoder_position_embedding = self.positions.embedding()
        if config.embedding_norm:
            self.decoder_embedding_norm = Norm(config)
        self.encoder = Stack(config, self.compute, causal=False, num_layers=config.num_layers)
        self.decoder = Stack(config, self.compute, causal=True, num_layers=config.decoder_layers)

    def __call__(self, batch: Batch, *, deterministic: bool) -> Outputs:
        def drop(x):  # after a last norm too (Raffel et al. 2020, section 2.1)
            return x if self.config.norm_at == "post" else self.dropout(x, deterministic=deterministic)

        positions, segments = batch["encoder_positions"], batch["encoder_segment_ids"]
        x = self.embed(batch["encoder_tokens"], positions, deterministic=deterministic)
        encoded = drop(self.encoder(x, positions, segments, deterministic=deterministic))
        x = self.embed(batch["tokens"], batch["positions"], side="decoder_", deterministic=deterministic)
        x = self.decoder(
            x,
            batch["positions"],
            batch["segment_ids"],
            encoded=encoded,
            encoded_segment_ids=segments,
            deterministic=deterministic,
        )
        return self.answer(drop(x), batch)
