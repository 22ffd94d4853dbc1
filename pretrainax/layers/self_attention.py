"""The self-attention classes of a block; `config.model` selects the class."""

from pretrainax.config import ModelConfig
from pretrainax.layers import latent_attention, sparse_attention  # noqa: F401 (the imports register the variants)
from pretrainax.layers.multi_head import ATTENTIONS, Attention


def self_attention_of(config: ModelConfig) -> type[Attention]:
    """Returns the class that computes the self-attention of a model's blocks."""
    return next(kind for kind in ATTENTIONS if kind.is_in(config))
