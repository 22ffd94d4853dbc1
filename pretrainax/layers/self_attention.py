"""The self-attention of a block, a class each kind; `config.model` says which of them a model has."""

from pretrainax.config import ModelConfig
from pretrainax.layers.latent_attention import MultiHeadLatentAttention
from pretrainax.layers.multi_head import Attention, MultiHeadAttention


def self_attention_of(config: ModelConfig) -> type[Attention]:
    """Returns the kind that the blocks of a model have."""
    return MultiHeadAttention if config.latent_attention is None else MultiHeadLatentAttention
