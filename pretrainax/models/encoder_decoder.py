"""Encoder-decoder: a decoder that also reads an encoded text (Vaswani et al. 2017; T5)."""

from pretrainax.layers.stack import Stack
from pretrainax.models.base import Batch, Model
from pretrainax.models.outputs import Outputs


class EncoderDecoder(Model):
    """Both sides share the embeddings. Segment i of the decoder reads segment i of the encoder."""

    def setup(self):
        super().setup()
        self.encoder = Stack(self.config, self.compute, causal=False)
        self.decoder = Stack(self.config, self.compute, causal=True)

    def __call__(self, batch: Batch, *, deterministic: bool) -> Outputs:
        def drop(x):  # at the end of each stack too (Raffel et al. 2020, section 2.1)
            return self.dropout(x, deterministic=deterministic)

        positions, segments = batch["encoder_positions"], batch["encoder_segment_ids"]
        x = self.embed(batch["encoder_tokens"], positions, deterministic=deterministic)
        encoded = drop(self.encoder(x, positions, segments, deterministic=deterministic))
        x = self.embed(batch["tokens"], batch["positions"], deterministic=deterministic)
        x = self.decoder(
            x,
            batch["positions"],
            batch["segment_ids"],
            encoded=encoded,
            encoded_segment_ids=segments,
            deterministic=deterministic,
        )
        return self.predict(drop(x))
