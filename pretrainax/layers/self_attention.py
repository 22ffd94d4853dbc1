"""The self-attention of a block, a class each kind; `config.model` says which of them a model has."""

from pretrainax.config import ModelConfig, RandomBlocks, SlidingWindows, SparseAttention
from pretrainax.layers.latent_attention import MultiHeadLatentAttention
from pretrainax.layers.multi_head import Attention, MultiHeadAttention
from pretrainax.layers.sparse_attention import BlockAttention, WindowAttention

_SPARSE: dict[type[SparseAttention], type[Attention]] = {SlidingWindows: WindowAttention, RandomBlocks: BlockAttention}


def self_attention_of(config: ModelConfig) -> type[Attention]:
    """Returns the kind that the blocks of a model have."""
    if config.sparse_attention is not None:
        return _SPARSE[type(config.sparse_attention)]
    return MultiHeadAttention if config.latent_attention is None else MultiHeadLatentAttention
