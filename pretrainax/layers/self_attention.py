"""The self-attention variants of a block, one class each; `config.model` selects the variant."""

from pretrainax.config import ModelConfig
from pretrainax.layers import latent_attention, sparse_attention  # noqa: F401 (the imports register the variants)
from pretrainax.layers.multi_head import ATTENTIONS, Attention


def self_attention_of(config: ModelConfig) -> type[Attention]:
    """Returns the self-attention class of a model's blocks."""
    return next(kind for kind in ATTENTIONS if kind.is_in(config))
