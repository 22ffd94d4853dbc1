"""Decoder: every token sees those before it (GPT-2, LLaMA), and of a prefix LM the whole prefix."""

from pretrainax.data.batch import Batch
from pretrainax.layers.stack import Stack
from pretrainax.models.base import Model
from pretrainax.models.outputs import Outputs
from pretrainax.sharding.param_paths import PyTree


class Decoder(Model):
    def setup(self):
        super().setup()
        self.decoder = Stack(self.config, self.compute, causal=True, num_layers=self.config.num_layers)

    def __call__(self, batch: Batch, *, deterministic: bool) -> Outputs:
        return self.decode(batch, deterministic=deterministic)

    def decode(self, batch: Batch, state: PyTree = None, *, deterministic: bool) -> Outputs:
        """Returns what the model says of each token; `state` of the blocks [L, …] comes back in the outputs."""
        x, side = self.decoder(
            self.embed(batch["tokens"], batch["positions"], deterministic=deterministic),
            batch["positions"],
            batch["segment_ids"],
            prefix_mask=batch.get("prefix_mask"),
            state=state,
            deterministic=deterministic,
        )
        return self.answer(x, side, batch, deterministic=deterministic)
