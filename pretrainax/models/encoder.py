"""Encoder: every token sees the whole segment (BERT)."""

import jax.numpy as jnp

from pretrainax.layers.stack import Stack
from pretrainax.models.base import Batch, Model
from pretrainax.models.outputs import Outputs


class Encoder(Model):
    def setup(self):
        super().setup()
        self.encoder = Stack(self.config, self.compute, causal=False)

    def __call__(self, batch: Batch, *, deterministic: bool) -> Outputs:
        """Logits at masked_positions [B, K] where the batch has them (15 % of the head's work), else everywhere."""
        x = self.embed(batch["tokens"], batch["positions"], batch.get("token_types"), deterministic=deterministic)
        x = self.encoder(x, batch["positions"], batch["segment_ids"], deterministic=deterministic)
        if "masked_positions" in batch:
            # [B, T, D] -> [B, K, D]
            x = jnp.take_along_axis(x, batch["masked_positions"][:, :, None], axis=1, mode="clip")
        return self.predict(x)
