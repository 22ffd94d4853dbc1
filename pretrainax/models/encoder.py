"""Encoder-only Transformer: each token attends to all tokens of its segment (BERT)."""

from pretrainax.config import ModelConfig
from pretrainax.data.batch import Batch, segments_of
from pretrainax.layers.stack import Stack
from pretrainax.models.base import Model, register_model
from pretrainax.models.outputs import Outputs


@register_model
class Encoder(Model):
    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return config.family == "encoder"

    def setup(self):
        super().setup()
        self.encoder = Stack(self.config, self.compute, causal=False, num_layers=self.config.num_layers)

    def __call__(self, batch: Batch, *, deterministic: bool) -> Outputs:
        x = self.embed(batch["tokens"], batch["positions"], batch.get("token_types"), deterministic=deterministic)
        absolute = self.absolute(batch["positions"]) if self.config.enhanced_mask_decoder else None
        inputs = batch["positions"], segments_of(batch)
        question = batch["question"] if self.config.reads_question else None
        x, side_outputs = self.encoder(x, *inputs, prefix_mask=question, ending=absolute, deterministic=deterministic)
        return self.head_outputs(x, side_outputs, batch, deterministic=deterministic)
