"""The self-attention layers that a block can use; `config.model` selects among them."""

from pretrainax.config import ModelConfig
from pretrainax.layers import latent_attention, sparse_attention  # noqa: F401 (the imports register the variants)
from pretrainax.layers.multi_head import ATTENTIONS, Attention


def self_attention_of(config: ModelConfig) -> type[Attention]:
    """Returns the class that computes self-attention in the model's blocks."""
    return next(cls for cls in ATTENTIONS if cls.is_in(config))
