"""The self-attention of a block, a class each kind; `config.model` says which of them a model has."""

from pretrainax.config import ModelConfig
from pretrainax.layers import latent_attention, sparse_attention  # noqa: F401 (which register their kinds)
from pretrainax.layers.multi_head import ATTENTIONS, Attention


def self_attention_of(config: ModelConfig) -> type[Attention]:
    """Returns the kind that the blocks of a model have."""
    return next(kind for kind in ATTENTIONS if kind.is_in(config))
