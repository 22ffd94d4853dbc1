"""Encoder: every token sees the whole segment (BERT)."""

import jax.numpy as jnp

from pretrainax.data.batch import Batch, is_gathered
from pretrainax.layers.stack import Stack
from pretrainax.models.base import Model, PairHead, ReplacedTokenHead
from pretrainax.models.outputs import Outputs


class Encoder(Model):
    def setup(self):
        super().setup()
        config = self.config
        self.encoder = Stack(config, self.compute, causal=False, num_layers=config.num_layers)
        if config.pair_head:
            self.pair_head = PairHead(config)
        if config.replaced_token_head:
            self.replaced_token_head = ReplacedTokenHead(config)

    def __call__(self, batch: Batch, *, deterministic: bool) -> Outputs:
        """Logits at masked_positions [B, K] where the batch has them (15 % of the head's work), else everywhere."""
        config = self.config
        x = self.embed(batch["tokens"], batch["positions"], batch.get("token_types"), deterministic=deterministic)
        absolute = self.absolute(batch["positions"]) if config.enhanced_mask_decoder else None
        x = self.encoder(x, batch["positions"], batch["segment_ids"], absolute=absolute, deterministic=deterministic)
        pair_logits = self.pair_head(x) if config.pair_head else None
        if config.replaced_token_head:
            return Outputs(pair_logits=pair_logits, replaced_logits=self.replaced_token_head(x, batch["segment_ids"]))
        if is_gathered(batch):
            # [B, T, D] -> [B, K, D]
            x = jnp.take_along_axis(x, batch["masked_positions"][:, :, None], axis=1, mode="clip")
        return self.predict(x).replace(pair_logits=pair_logits)
