"""Multi-head attention with its four projections: self- and cross-attention, grouped queries, rotary positions."""

import dataclasses
from typing import ClassVar, Optional, TypeVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask, attention, choose_backend
from pretrainax.layers.attention_spec import Weights, report_attention, spec_of
from pretrainax.layers.cache import KeyValues
from pretrainax.layers.compute import Compute
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions import PositionTerms, positions_for
from pretrainax.layers.rematerialization import fan_out, saved_residual
from pretrainax.sharding.mesh import platform
from pretrainax.sharding.rules import add_partition_rules


class Attention(nn.Module):
    """The base class of attention layers. It chooses the backend and applies the output projection."""

    config: ModelConfig
    compute: Compute
    deterministic: bool = True  # True disables dropout of attention weights

    partition_rules: ClassVar[tuple[tuple[str, str], ...]] = ()  # rows of sharding.rules.PARTITION_RULES
    has_pairs: ClassVar[bool] = True  # False: `flops` also counts the matmuls of queries and keys

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        """Returns whether the blocks of this model use this class for self-attention."""
        raise NotImplementedError

    @staticmethod
    def flops(config: ModelConfig, length: int, read: int) -> int:
        """Returns the number of floating-point operations in the projections' forward pass, for one sequence.

        Matmuls between queries and keys are counted only if the class attribute `has_pairs` is False.

        Args:
          length: number of queries.
          read: number of keys.
        """
        raise NotImplementedError

    @nn.nowrap  # keeps the name of the method out of Flax's scopes
    def attended(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Mask,
        bias: Optional[jax.Array],
        positions: PositionTerms,
        scale: float,
        fused: bool = True,
    ) -> jax.Array:
        """Computes attention for the queries q [B, T, H, K] with the backend that the config and the platform select.

        The arguments and the result are as in `attention`.

        Args:
          positions: position terms, which indicate whether the bias differs between rows.
          fused: whether a fused kernel may be used. False selects `xla`, because a fused kernel is not faster for a few
            queries.
        """
        config = self.config
        cap, rate, sinks = config.attention_logit_cap, config.attention_dropout_rate, None
        flags = {"bias_by_row": positions.has_row_bias, "logit_cap": cap, "dropout_rate": rate}
        if config.attention_sinks:
            sinks = self.param("sinks", normal_init(config, fan_in=1), (config.num_heads,), jnp.float32)
        spec = spec_of(q, k, mask, bias, has_sinks=sinks is not None, **flags)
        report_attention(spec)  # reports the training spec, also in evaluation
        if mask.windowed is not None:  # initialization traces one block for local and global layers
            report_attention(dataclasses.replace(spec, window=None))
        spec = dataclasses.replace(spec, dropout_rate=0.0) if self.deterministic else spec
        # The warning is ignored here. The header of a run, which chooses from the same spec, prints it.
        implementation, _ = choose_backend(self.compute.attention if fused else "xla", platform(), spec)
        drop = Dropout(spec.dropout_rate).with_key() if spec.dropout_rate else None
        weights = Weights(drop, sinks, cap)
        return attention(q, k, v, mask=mask, bias=bias, scale=scale, implementation=implementation, weights=weights)

    @nn.nowrap
    def out(self, y: jax.Array) -> jax.Array:
        """Projects the heads' outputs to the width of the residual stream, [B, T, H, K] -> [B, T, D]."""
        config = self.config
        init = normal_init(config, y.shape[2] * y.shape[3], residual=True)
        return Linear((config.d_model,), ("num_heads", "head_dim", "d_model"), init, config.use_bias, name="out")(y)


ATTENTIONS: list[type[Attention]] = []
_Kind = TypeVar("_Kind", bound=type[Attention])


def register_attention(cls: _Kind) -> _Kind:
    """Registers an attention class and its partition rules, and returns the class.

    If several classes match a config, the class registered last is used.
    """
    ATTENTIONS.insert(0, cls)
    add_partition_rules(cls.partition_rules)
    return cls


@register_attention
class MultiHeadAttention(Attention):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2) or grouped-query attention (Ainslie et al. 2023)."""

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return True

    @staticmethod
    def flops(config: ModelConfig, length: int, read: int, source_width: Optional[int] = None) -> int:
        """Returns the number of floating-point operations in the projections, as in `Attention`.

        Args:
          source_width: size of the vectors from which keys and values are computed. If None, it is d_model.
        """
        width, kv_width = config.num_heads * config.dim_per_head, config.kv_heads * config.dim_per_head
        query_and_out = 2 * 2 * length * config.d_model * width
        key_and_value = 2 * 2 * read * (source_width or config.d_model) * kv_width
        return query_and_out + key_and_value

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        source: jax.Array | KeyValues,
        mask: Mask,
        positions: PositionTerms,
        ring: Optional[KeyValues] = None,
        index: Optional[jax.Array] = None,
        value_source: Optional[jax.Array] = None,
    ) -> tuple[jax.Array, KeyValues]:
        """Attends from x [B, T, D] to `source`, and returns the output [B, T, D] and the KV cache for later queries.

        Args:
          source: [B, S, E], from which keys and values are computed; or the KV cache of an earlier call.
          ring: ring buffer with the tokens before x [B, 1, D]. The keys and values of x are appended to it, and the
            query attends to the ring buffer. If None, the query attends to `source`.
          index: [], token index of x in the ring buffer, or None without `ring`.
          value_source: a copy of `source` (`fan_out`) from which values are computed. If None, it is `source`.
        """
        chex.assert_rank(x, 3, custom_message="x is [B, T, D]")
        is_cached = isinstance(source, KeyValues)
        if not is_cached:
            message = "source is [B, S, E] with B of x [B, T, D]"
            chex.assert_shape(source, (x.shape[0], None, None), custom_message=message)
        config, head_dim = self.config, self.config.dim_per_head
        qkv_bias = config.use_bias if config.qkv_bias is None else config.qkv_bias

        def head_projection(name, num_heads, width, gain=1.0):  # [B, T, D] -> [B, T, H, K]
            init = normal_init(config, width, gain)
            axes = ("d_model", "num_heads" if name == "query" else "num_kv_heads", "head_dim")
            return Linear((num_heads, head_dim), axes, init, qkv_bias, name=name)

        scale = scale_of(config, positions)
        to_query = head_projection("query", config.num_heads, x.shape[2], gain=head_dim**-0.5 / scale)
        # In cross-attention, the encoder may be wider than the decoder.
        source_width = x.shape[2] if is_cached else source.shape[2]
        to_key, to_value = (head_projection(name, config.kv_heads, source_width) for name in ("key", "value"))
        if source is x:
            x, source = fan_out(x)
        q = to_query(x)
        if isinstance(source, KeyValues):
            k, v = source.heads_last()
        else:
            k, v = to_key(source), to_value(source if value_source is None else value_source)
        bias = positions.bias(config, q, k, to_query, to_key, scale)
        if config.qk_norm:
            q, k = self._normalize_heads("query_norm", q), k if is_cached else self._normalize_heads("key_norm", k)
        q, k = positions.rotate(q, k)
        q, k, v = saved_residual(q), saved_residual(k), saved_residual(v)
        cache = KeyValues.from_arrays(k, v)
        if ring is not None:
            cache = ring.append(cache, index)
            k, v = cache.heads_last()
            mask, bias = cache.mask_for_query(index, mask, bias)
        y = self.attended(q, k, v, mask, bias, positions, scale, fused=not is_cached and ring is None)
        return self.out(y), cache

    @nn.nowrap  # keeps the name of the method out of Flax's scopes
    def _normalize_heads(self, name: str, x: jax.Array) -> jax.Array:
        """Normalizes queries or keys [B, T, H, K], each head separately or all together (`config.qk_norm_heads`)."""
        norm = Norm(self.config, name=name)
        if self.config.qk_norm_heads == "each":
            return norm(x)
        # [B, T, H, K] -> [B, T, H · K] -> [B, T, H, K]
        return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)


def scale_of(config: ModelConfig, positions: PositionTerms) -> float:
    """Returns the factor by which attention multiplies the dot products of queries and keys.

    This factor is `config.attention_scale` or, if that is None, follows from the head size. The position encoding may
    multiply it.

    NOTE T5 does not divide the logits by sqrt(K). Instead, it divides the query kernel's initial values by sqrt(K).
    """
    scale = config.attention_scale
    if scale is None:
        scale = (positions.logit_terms * config.dim_per_head) ** -0.5
    return scale * positions_for(config).logit_gain
