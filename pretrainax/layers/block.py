"""The block shared by all model families: self-attention, cross-attention to an encoded sequence, and feed-forward."""

import functools
from collections.abc import Callable
from typing import Optional, TypeAlias

import chex
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask
from pretrainax.layers.cache import BlockKVCache
from pretrainax.layers.compute import Compute
from pretrainax.layers.convolution import Branch
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.eight_bit import with_products
from pretrainax.layers.feed_forward import feed_forwards_of
from pretrainax.layers.multi_head import MultiHeadAttention
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.rematerialization import barrier, fan_out, saved_residual
from pretrainax.layers.self_attention import self_attention_of
from pretrainax.layers.sums import Sums, add_sums
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.param_paths import PyTree

# The function of a sublayer: x [B, T, D] -> (output to add to the hidden states, auxiliary output). Two copies of x may
# follow x (`fan_out`).
Function: TypeAlias = Callable[..., tuple[jax.Array, PyTree]]


@flax.struct.dataclass
class Context:
    """The inputs that all blocks of a stack share, such as the mask and the encoded sequence."""

    mask: Mask  # mask for self-attention, with the window of the local layers
    positions: PositionTerms  # position terms for self-attention
    encoded: Optional[jax.Array] = None  # [B, S, D], input of cross-attention; None: in the KV cache
    cross_mask: Optional[Mask] = None  # mask for cross-attention; None: no cross-attention
    index: Optional[jax.Array] = None  # [], index of the next token after the KV cache; None: no ring buffers
    # Whether all layers that get this context are local; None: `Layer.is_local` differs between them
    is_local: Optional[bool] = flax.struct.field(pytree_node=False, default=None)
    deterministic: bool = flax.struct.field(pytree_node=False, default=True)  # True disables dropout


@flax.struct.dataclass
class Layer:
    """Per-layer flags and the layer index: scalars for one block, arrays [L] for a stack."""

    is_first: jax.Array
    is_last: jax.Array
    is_local: jax.Array  # True in layers with a window (`config.layer_pattern`)
    number: jax.Array  # layer index, int32


@flax.struct.dataclass
class AuxOutputs:
    """Outputs of a block in addition to its hidden states.

    A stack stacks the blocks' `state` as [L, …] and adds up their `sums`.
    """

    # The block's state for the next call, for example its updated KV cache; None: the block has no state.
    state: PyTree = None
    sums: Sums = flax.struct.field(default_factory=dict)  # auxiliary losses and metrics


class Block(nn.Module):
    """A block of sublayers that each add their output to the residual stream: attention and feed-forward layers.

    NOTE T5 also applies dropout inside the feed-forward layer. Here each sublayer applies dropout once, to its output.
    """

    config: ModelConfig
    compute: Compute

    @nn.compact
    @with_products
    def __call__(
        self,
        x: jax.Array,
        layer: Layer,
        context: Context,
        state: Optional[BlockKVCache] = None,
        branch: Optional[Branch] = None,
        source: Optional[jax.Array] = None,
    ) -> tuple[jax.Array, AuxOutputs]:
        """Returns the hidden states [B, T, D] after the block, and the block's auxiliary outputs.

        Args:
          state: the block's KV cache; the auxiliary outputs contain the updated cache. If None, nothing is cached.
          branch: optional output of a parallel convolution, which is joined with the output of the first block.
          source: [B, T, D], the input from which self-attention computes keys and values. If None, they are computed
            from the same input as the queries.
        """
        config = self.config
        chex.assert_rank(x, 3, custom_message="the stream is [B, T, D]")
        sublayer = functools.partial(self._sublayer, layer, context.deterministic)
        mask, is_local = context.mask, layer.is_local if context.is_local is None else context.is_local
        if not isinstance(is_local, bool):
            mask = mask.replace(windowed=is_local) if len(set(config.layer_pattern)) > 1 else mask
        elif not is_local:
            mask = mask.replace(window=None)
        if config.sparse_attention is not None:
            mask = mask.replace(layer=layer.number)
        positions = context.positions.in_block(config, is_local, layer.number, context.deterministic)
        x = constrain(x)
        cache = BlockKVCache() if state is None else state
        attend = self_attention_of(config)(config, self.compute, context.deterministic, name="self_attention")
        ring = None if context.index is None else cache.self_attention
        real = None if mask.query_segment_ids is None else mask.query_segment_ids > 0
        feed_forwards = [spec.kind(spec.config, name=spec.name) for spec in feed_forwards_of(config)]

        def self_attend(y: jax.Array, *copies: jax.Array) -> tuple[jax.Array, PyTree]:
            if copies and source is None and isinstance(attend, MultiHeadAttention):
                return attend(*copies, mask, positions, ring, context.index, y)
            return attend(y, y if source is None else source, mask, positions, ring, context.index)

        def attend_and_feed_forward(y: jax.Array, *_: jax.Array) -> tuple[jax.Array, PyTree]:
            (attention_output, new_cache), (feed_forward_output, sums) = self_attend(y), feed_forwards[0](y, real)
            return attention_output + feed_forward_output, (new_cache, sums)

        cross_cache = None
        if config.parallel:
            x, (new_cache, sums) = sublayer("self_attention", x, attend_and_feed_forward)
        else:
            x, new_cache = sublayer("self_attention", x, self_attend)
            if context.cross_mask is not None:
                x, cross_cache = self._cross_attend(x, cache, context, sublayer)
            sums: Sums = {}
            for feed_forward in feed_forwards:
                x, new_sums = sublayer(str(feed_forward.name), x, lambda y, *_, run=feed_forward: run(y, real))
                sums = add_sums(sums, new_sums)
        x = constrain(x)
        if branch is not None:
            x = jnp.where(layer.is_first, branch.join(x, config), x)
        self.sow("intermediates", "hidden", x)  # available with model.apply(…, mutable=["intermediates"])
        return x, AuxOutputs(None if state is None else BlockKVCache(new_cache, cross_cache), sums)

    @nn.nowrap  # keeps the name of the method out of Flax's scopes
    def _sublayer(
        self, layer: Layer, deterministic: bool, name: str, x: jax.Array, function: Function
    ) -> tuple[jax.Array, PyTree]:
        """Adds the output of `function` to the hidden states, and returns them with the auxiliary output of `function`.

        `config.norm_at` selects where the norms are applied.
        """
        config = self.config
        norm = Norm(config, name=f"{name}_norm")
        dropout = Dropout(config.dropout_rate, deterministic=deterministic)
        if config.norm_at in ("post", "after"):
            # Behind a barrier, the residual connection reads x instead of normalizing it again. The copies are for the
            # queries and the keys, so that each matmul of the backward adds the gradients of the further uses of x.
            query_source, rest = fan_out(barrier(x))
            key_source, x = fan_out(rest)
            y, side_output = function(x, query_source, key_source)
            return norm(saved_residual(x + dropout(y))) if config.norm_at == "post" else saved_residual(
                x + dropout(norm(y))
            ), side_output
        y = norm(x)
        if config.norm_starts_stream and name == "self_attention":
            x = jnp.where(layer.is_first, y, x)
        y, side_output = function(y)
        y = Norm(config, name=f"{name}_post_norm")(y) if config.norm_at == "both" else y
        return saved_residual(x + dropout(y)), side_output

    @nn.nowrap
    def _cross_attend(
        self, x: jax.Array, cache: BlockKVCache, context: Context, sublayer: Callable
    ) -> tuple[jax.Array, PyTree]:
        """Applies cross-attention to an encoded sequence, and returns the hidden states and the sequence's KV cache."""
        cross = MultiHeadAttention(self.config, self.compute, context.deterministic, name="cross_attention")
        encoded = context.encoded if cache.cross_attention is None else cache.cross_attention
        return sublayer("cross_attention", x, lambda y, *_: cross(y, encoded, context.cross_mask, PositionTerms()))
