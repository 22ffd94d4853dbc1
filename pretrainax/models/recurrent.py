"""Recurrent model: two stacks of LSTMs over character-based word vectors (ELMo: Peters et al. 2018, arXiv 1802.05365).

LSTMs replace the blocks of a Transformer. The forward LSTMs predict the next word, the backward LSTMs predict the
previous word, and both directions share one output matrix.
"""

import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig, Recurrent
from pretrainax.data.batch import Batch
from pretrainax.layers.block import AuxOutputs
from pretrainax.layers.characters import CharacterEmbedding
from pretrainax.layers.recurrent import RecurrentBlock, RecurrentStack
from pretrainax.layers.scalar_mix import ScalarMix
from pretrainax.models.base import Flops, Model, register_model
from pretrainax.models.heads import heads_of
from pretrainax.models.outputs import Outputs


@register_model
class RecurrentModel(Model):
    """A bidirectional language model without a token embedding table.

    The hidden states are [B, T, 2 D]. The first half comes from the forward LSTMs, the second half from the backward
    LSTMs. A task head reads a learned average of all layers and of the word vectors (Peters et al. 2018, section 3.2).
    """

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return config.part(Recurrent) is not None

    @staticmethod
    def flops(config: ModelConfig, inputs: int, targets: int) -> Flops:
        blocks = config.num_layers * RecurrentBlock.flops(config, inputs)
        heads = sum(head.flops(config, inputs, targets) for head in heads_of(config))
        return Flops(blocks, CharacterEmbedding.flops(config, inputs) + heads)

    def setup(self):
        super().setup()
        self.character_embedding = CharacterEmbedding(self.config, self.compute.dtype)
        self.recurrent = RecurrentStack(self.config, self.compute, num_layers=self.config.num_layers)
        if self.config.head is not None:
            self.scalar_mix = ScalarMix()

    def __call__(self, batch: Batch, *, deterministic: bool) -> Outputs:
        words = self.character_embedding(batch["characters"])
        x, side_outputs = self.recurrent(words, batch["segment_ids"], deterministic=deterministic)
        if self.config.head is not None:
            x = self.scalar_mix(_stack_layers(words, side_outputs.state))
        x = self.dropout(x, deterministic=deterministic)
        return self.head_outputs(x, AuxOutputs(sums=side_outputs.sums), batch, deterministic=deterministic)


def _stack_layers(words: jax.Array, lstm_outputs: jax.Array) -> jax.Array:
    """Stacks the word vectors and the outputs of the LSTM layers, [B, T, D], [L, B, T, 2 D] -> [L + 1, B, T, 2 D].

    The word vectors are duplicated along the feature axis, once per direction.
    """
    return jnp.concatenate([jnp.concatenate([words, words], axis=-1)[None], lstm_outputs])
