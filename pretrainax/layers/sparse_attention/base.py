"""The base class of block-sparse attention, which computes queries, keys and values and reports the attention spec."""

import dataclasses
from typing import Optional

import chex
import flax.linen as nn
import jax

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask, choose_backend
from pretrainax.layers.attention_spec import KeyBlocks, report_attention, spec_of
from pretrainax.layers.cache import KeyValues
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.multi_head import Attention, MultiHeadAttention, scale_of
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.rematerialization import saved_residual
from pretrainax.sharding.mesh import platform


class BlockSparseAttention(Attention):
    """Self-attention in which each token attends to some tokens of its segment. Subclasses select them in `attend`."""

    @staticmethod
    def flops(config: ModelConfig, length: int, read: int) -> int:
        return MultiHeadAttention.flops(config, length, read)

    @staticmethod
    def blocks(config: ModelConfig, length: int) -> Optional[KeyBlocks]:
        """Returns the key blocks that rows of `length` tokens attend to, or None if tokens attend to all keys."""
        raise NotImplementedError

    @nn.nowrap
    def attend(
        self, x: jax.Array, qkv: tuple[jax.Array, ...], mask: Mask, positions: PositionTerms, scale: float
    ) -> jax.Array:
        """Computes attention for each token and head, [B, T, H, K].

        Args:
          x: [B, T, D]; qkv: queries, keys and values computed from x, [B, T, H, K] each.
          mask: the mask with the segment ids [B, T].
          scale: the factor of the logits.
        """
        raise NotImplementedError

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        source: jax.Array | KeyValues,
        mask: Mask,
        positions: PositionTerms,
        ring: Optional[KeyValues] = None,
        index: Optional[jax.Array] = None,
    ) -> tuple[jax.Array, KeyValues]:
        """Attends from x [B, T, D] to `source`, which must be x, and returns the output and the keys and values.

        The arguments and the results are as in `MultiHeadAttention`. `ring` and `index` must be None.
        """
        chex.assert_equal_shape((x, source), custom_message="sparse attention is self-attention: x must be source")
        assert ring is None and index is None and mask.query_segment_ids is not None  # an encoder has no KV cache
        q, k, v = self.heads(x, positions)
        spec = spec_of(q, k, mask, None, bias_by_row=False, logit_cap=None)
        blocks, rate = self.blocks(self.config, x.shape[1]), self.config.attention_dropout_rate
        spec = dataclasses.replace(spec, blocks=blocks, dropout_rate=rate)
        report_attention(spec)
        # Raises UserError if config.train.attention requests a kernel, because kernels do not support blocks.
        choose_backend(self.compute.attention, platform(), spec)
        y = self.attend(x, (q, k, v), mask, positions, scale_of(self.config, positions))
        return self.out(y), KeyValues.from_arrays(k, v)

    @nn.nowrap  # keeps the name of the method out of Flax's scopes
    def heads(self, x: jax.Array, positions: PositionTerms, prefix: str = "") -> tuple[jax.Array, ...]:
        """Computes the queries, keys and values of each head, [B, T, D] -> [B, T, H, K] each.

        Args:
          prefix: prefix for the names of the linear layers that compute queries, keys and values.
        """
        config = self.config
        qkv_bias = config.use_bias if config.qkv_bias is None else config.qkv_bias
        features, init = (config.num_heads, config.dim_per_head), normal_init(config, config.d_model)
        axes = ("d_model", "num_heads", "head_dim")
        q, k, v = (
            Linear(features, axes, init, qkv_bias, name=f"{prefix}{name}")(x) for name in ("query", "key", "value")
        )
        q, k = positions.rotate(q, k)
        return saved_residual(q), saved_residual(k), saved_residual(v)

    @nn.nowrap
    def dropout(self) -> Optional[Dropout]:
        """Returns the dropout for attention weights, or None in evaluation or if its rate is 0."""
        rate = self.config.attention_dropout_rate
        return Dropout(rate, deterministic=False) if rate and not self.deterministic else None
