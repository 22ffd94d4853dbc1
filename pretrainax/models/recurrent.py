"""Recurrent model: two stacks of LSTMs over word vectors from characters (ELMo: Peters et al. 2018, arXiv 1802.05365).

LSTMs replace the blocks of a Transformer. The forward LSTMs predict the next word, the backward LSTMs predict the
previous word, and both share one output matrix.
"""

import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig, Recurrent
from pretrainax.data.batch import Batch
from pretrainax.layers.block import SideOutputs
from pretrainax.layers.characters import CharacterEmbedding
from pretrainax.layers.recurrent import RecurrentBlock, RecurrentStack
from pretrainax.layers.scalar_mix import ScalarMix
from pretrainax.models.base import Flops, Model, register_model
from pretrainax.models.heads import heads_of
from pretrainax.models.outputs import Outputs


@register_model
class RecurrentModel(Model):
    """A bidirectional language model without a token embedding table.

    The hidden states are [B, T, 2 D]. The first half is the forward stream, and the second half the backward stream.
    The head of a task reads a learned average of all layers and of the word vectors (Peters et al. 2018, section 3.2).
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
        x, side = self.recurrent(words, batch["segment_ids"], deterministic=deterministic)
        if self.config.head is not None:
            x = self.scalar_mix(_layers(words, side.state))
        x = self.dropout(x, deterministic=deterministic)
        return self.head_outputs(x, SideOutputs(sums=side.sums), batch, deterministic=deterministic)


def _layers(words: jax.Array, above: jax.Array) -> jax.Array:
    """Stacks the word vectors and the outputs of the LSTM layers, [B, T, D], [L, B, T, 2 D] -> [L + 1, B, T, 2 D].

    The word vectors are repeated twice along the features, once for each direction.
    """
    return jnp.concatenate([jnp.concatenate([words, words], axis=-1)[None], above])
