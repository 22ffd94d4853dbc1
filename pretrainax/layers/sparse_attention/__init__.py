"""Attention whose cost is linear in the length: each token meets a part of its text."""

from pretrainax.layers.sparse_attention.base import AttentionByBlocks
from pretrainax.layers.sparse_attention.blocks import BlockAttention
from pretrainax.layers.sparse_attention.windows import WindowAttention

__all__ = ["AttentionByBlocks", "BlockAttention", "WindowAttention"]
