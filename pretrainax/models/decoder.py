"""Decoder: every token sees those before it (GPT-2, LLaMA), and of a prefix LM the whole prefix."""

from pretrainax.layers.stack import Stack
from pretrainax.models.base import Batch, Model
from pretrainax.models.outputs import Outputs


class Decoder(Model):
    def setup(self):
        super().setup()
        self.decoder = Stack(self.config, self.compute, causal=True, num_layers=self.config.num_layers)

    def __call__(self, batch: Batch, *, deterministic: bool) -> Outputs:
        x = self.embed(batch["tokens"], batch["positions"], deterministic=deterministic)
        x = self.decoder(
            x,
            batch["positions"],
            batch["segment_ids"],
            prefix_mask=batch.get("prefix_mask"),
            deterministic=deterministic,
        )
        return self.answer(x, batch)
