"""The block of all model families: self-attention, cross-attention to an encoded sequence, and feed-forwards."""

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
from pretrainax.layers.feed_forward import feed_forwards_of
from pretrainax.layers.multi_head import MultiHeadAttention
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.rematerialization import saved_residual
from pretrainax.layers.self_attention import self_attention_of
from pretrainax.layers.sums import Sums, add_sums
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.param_paths import PyTree

# The function of a sublayer: x [B, T, D] -> (the output that is added to the stream, side output)
Function: TypeAlias = Callable[[jax.Array], tuple[jax.Array, PyTree]]


@flax.struct.dataclass
class Context:
    """The inputs that all blocks of a stack share, such as the mask and the encoded sequence."""

    mask: Mask  # mask of self-attention, with the window of the local layers
    positions: PositionTerms  # position terms of self-attention
    encoded: Optional[jax.Array] = None  # [B, S, D], read by cross-attention; None: it is in the KV cache
    cross_mask: Optional[Mask] = None  # mask of cross-attention; None: no cross-attention
    index: Optional[jax.Array] = None  # [], index of the token after the KV cache; None: no ring buffers
    deterministic: bool = flax.struct.field(pytree_node=False, default=True)  # True: no dropout


@flax.struct.dataclass
class Layer:
    """Per-layer flags and the layer index: scalars for one block, arrays [L] for a stack."""

    is_first: jax.Array
    is_last: jax.Array
    is_local: jax.Array  # True in layers with a window (`config.layer_pattern`)
    number: jax.Array  # layer number, int32, from 0


@flax.struct.dataclass
class SideOutputs:
    """Outputs of a block in addition to the stream; in a stack, `state` is stacked [L, …] and `sums` are added up."""

    # The state of the block for the next call, for example its updated KV cache; None: the block has no state.
    state: PyTree = None
    sums: Sums = flax.struct.field(default_factory=dict)  # auxiliary losses and metrics


class Block(nn.Module):
    """A block of sublayers that each add their output to the residual stream: attention and feed-forwards.

    NOTE T5 also has dropout inside the feed-forward. Here each sublayer has dropout once, on its output.
    """

    config: ModelConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        layer: Layer,
        context: Context,
        state: Optional[BlockKVCache] = None,
        branch: Optional[Branch] = None,
        source: Optional[jax.Array] = None,
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the stream [B, T, D] after the block, and the side outputs of the block.

        Args:
          state: the KV cache of the layer, which is returned updated in the side outputs. None disables caching.
          branch: the output of a parallel convolution, which is joined with the output of the first block; None: no
            convolution.
          source: the input from which self-attention computes keys and values, [B, T, D]; None: the same as for
            queries.
        """
        config = self.config
        chex.assert_rank(x, 3, custom_message="the stream is [B, T, D]")

        sublayer = functools.partial(self._sublayer, layer, context.deterministic)
        mask = context.mask
        if len(set(config.layer_pattern)) > 1:
            mask = mask.replace(windowed=layer.is_local)
        if config.sparse_attention is not None:
            mask = mask.replace(layer=layer.number)
        positions = context.positions.in_block(config, layer.is_local, layer.number, context.deterministic)
        x = constrain(x)
        cache = BlockKVCache() if state is None else state
        attend = self_attention_of(config)(config, self.compute, context.deterministic, name="self_attention")
        ring = None if context.index is None else cache.self_attention
        real = None if mask.query_segment_ids is None else mask.query_segment_ids > 0
        feed_forwards = [part.kind(part.config, name=part.name) for part in feed_forwards_of(config)]

        def attended(y: jax.Array) -> tuple[jax.Array, PyTree]:
            return attend(y, y if source is None else source, mask, positions, ring, context.index)

        def parallel(y: jax.Array) -> tuple[jax.Array, PyTree]:
            (attention, own_cache), (update, sums) = attended(y), feed_forwards[0](y, real)
            return attention + update, (own_cache, sums)

        cross_cache = None
        if config.parallel:
            x, (own_cache, sums) = sublayer("self_attention", x, parallel)
        else:
            x, own_cache = sublayer("self_attention", x, attended)
            if context.cross_mask is not None:
                x, cross_cache = self._cross_attend(x, cache, context, sublayer)
            sums: Sums = {}
            for feed_forward in feed_forwards:
                x, new_sums = sublayer(str(feed_forward.name), x, lambda y, run=feed_forward: run(y, real))
                sums = add_sums(sums, new_sums)
        x = constrain(x)
        if branch is not None:
            x = jnp.where(layer.is_first, branch.join(x, config), x)
        self.sow("intermediates", "hidden", x)  # available with model.apply(…, mutable=["intermediates"])
        return x, SideOutputs(None if state is None else BlockKVCache(own_cache, cross_cache), sums)

    @nn.nowrap  # keeps the name of the method out of Flax's scopes
    def _sublayer(
        self, layer: Layer, deterministic: bool, name: str, x: jax.Array, function: Function
    ) -> tuple[jax.Array, PyTree]:
        """Returns the stream after one sublayer, and the side output of `function`.

        The output of `function` is added to the stream. `config.norm_at` selects where the norms are.
        """
        config = self.config
        norm = Norm(config, name=f"{name}_norm")
        dropout = Dropout(config.dropout_rate, deterministic=deterministic)
        if config.norm_at in ("post", "after"):
            y, side = function(x)
            return norm(saved_residual(x + dropout(y))) if config.norm_at == "post" else saved_residual(
                x + dropout(norm(y))
            ), side
        y = norm(x)
        if config.norm_starts_stream and name == "self_attention":
            x = jnp.where(layer.is_first, y, x)
        y, side = function(y)
        y = Norm(config, name=f"{name}_post_norm")(y) if config.norm_at == "both" else y
        return saved_residual(x + dropout(y)), side

    @nn.nowrap
    def _cross_attend(
        self, x: jax.Array, cache: BlockKVCache, context: Context, sublayer: Callable
    ) -> tuple[jax.Array, PyTree]:
        """Returns the stream after cross-attention to an encoded sequence, and the KV cache of the encoded sequence."""
        cross = MultiHeadAttention(self.config, self.compute, context.deterministic, name="cross_attention")
        encoded = context.encoded if cache.cross_attention is None else cache.cross_attention
        return sublayer("cross_attention", x, lambda y: cross(y, encoded, context.cross_mask, PositionTerms()))
