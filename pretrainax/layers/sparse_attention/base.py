"""The base of attention by blocks: queries, keys and values of each head, and what is known of it before it runs."""

import dataclasses
from typing import Optional

import chex
import flax.linen as nn
import jax

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask, choose_implementation
from pretrainax.layers.attention_spec import KeyBlocks, report_attention, spec_of
from pretrainax.layers.cache import KeysAndValues
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.made_again import kept
from pretrainax.layers.multi_head import Attention, MultiHeadAttention, scale_of
from pretrainax.layers.positions import PositionTerms
from pretrainax.sharding.mesh import platform


class AttentionByBlocks(Attention):
    """Attends to a part of each text; a kind says to which, in `read`."""

    @staticmethod
    def flops(config: ModelConfig, length: int, read: int) -> int:
        return MultiHeadAttention.flops(config, length, read)

    @staticmethod
    def blocks(config: ModelConfig, length: int) -> Optional[KeyBlocks]:
        """Returns which keys are multiplied in a row of `length` tokens; None: all."""
        raise NotImplementedError

    @nn.nowrap
    def read(
        self, x: jax.Array, qkv: tuple[jax.Array, ...], mask: Mask, positions: PositionTerms, scale: float
    ) -> jax.Array:
        """Returns what each token reads, [B, T, H, K].

        Args:
          x: [B, T, D]; qkv: queries, keys and values made of it, [B, T, H, K] each.
          mask: of segments, [B, T].
        """
        raise NotImplementedError

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        source: jax.Array | KeysAndValues,
        mask: Mask,
        positions: PositionTerms,
        ring: Optional[KeysAndValues] = None,
        index: Optional[jax.Array] = None,
    ) -> tuple[jax.Array, KeysAndValues]:
        """Attends to the tokens of `source` [B, T, D], which is x; arguments and results as of MultiHeadAttention."""
        chex.assert_equal_shape((x, source), custom_message="sparse attention is of a text to itself: x is source")
        assert ring is None and index is None and mask.query_segment_ids is not None  # an encoder writes nothing
        q, k, v = self.heads(x, positions)
        spec = spec_of(q, k, mask, None, bias_by_row=False, logit_cap=None)
        blocks, rate = self.blocks(self.config, x.shape[1]), self.config.attention_dropout_rate
        spec = dataclasses.replace(spec, blocks=blocks, dropout_rate=rate)
        report_attention(spec)
        choose_implementation(self.compute.attention, platform(), spec)  # raises for a kernel, which knows no blocks
        y = self.read(x, (q, k, v), mask, positions, scale_of(self.config, positions))
        return self.out(y), KeysAndValues.of(k, v)

    @nn.nowrap  # whose name would stand in those of what is computed here
    def heads(self, x: jax.Array, positions: PositionTerms, prefix: str = "") -> tuple[jax.Array, ...]:
        """Returns queries, keys and values of each head, [B, T, D] -> [B, T, H, K], of the maps of a prefix."""
        config = self.config
        qkv_bias = config.use_bias if config.qkv_bias is None else config.qkv_bias
        features, init = (config.num_heads, config.dim_per_head), normal_init(config, config.d_model)
        axes = ("d_model", "num_heads", "head_dim")
        q, k, v = (
            Linear(features, axes, init, qkv_bias, name=f"{prefix}{name}")(x) for name in ("query", "key", "value")
        )
        q, k = positions.rotate(q, k)
        return kept(q), kept(k), kept(v)

    @nn.nowrap
    def dropout(self) -> Optional[Dropout]:
        """Returns what drops weights of attention in training; None: none are dropped."""
        rate = self.config.attention_dropout_rate
        return Dropout(rate, deterministic=False) if rate and not self.deterministic else None
