"""Sparse attention, whose cost is linear in the length because each token attends to few tokens of its segment."""

from pretrainax.layers.sparse_attention.base import BlockSparseAttention
from pretrainax.layers.sparse_attention.blocks import BlockAttention
from pretrainax.layers.sparse_attention.windows import WindowAttention

__all__ = ["BlockSparseAttention", "BlockAttention", "WindowAttention"]
