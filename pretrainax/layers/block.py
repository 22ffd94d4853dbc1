"""The one block of every family: self-attention, cross-attention where it is given something to read, feed-forward; of
some mixtures of experts, another feed-forward."""

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
from pretrainax.layers.cache import BlockMemory
from pretrainax.layers.compute import Compute
from pretrainax.layers.convolution import Branch
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.feed_forward import feed_forwards_of
from pretrainax.layers.made_again import kept
from pretrainax.layers.multi_head import MultiHeadAttention
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions import PositionTerms
from pretrainax.layers.self_attention import self_attention_of
from pretrainax.layers.sums import Sums, added
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.param_paths import PyTree

Function: TypeAlias = Callable[[jax.Array], tuple[jax.Array, PyTree]]  # of a sublayer: what is added, what is beside


@flax.struct.dataclass
class Context:
    """Holds what all blocks of a stack share."""

    mask: Mask  # of self-attention; its window is that of local layers
    positions: PositionTerms  # of self-attention
    encoded: Optional[jax.Array] = None  # [B, S, D], what cross-attention reads, unless the blocks remember it
    cross_mask: Optional[Mask] = None  # None: there is no cross-attention
    index: Optional[jax.Array] = None  # [], of a token that follows on those that the blocks remember
    deterministic: bool = flax.struct.field(pytree_node=False, default=True)  # no dropout


@flax.struct.dataclass
class Layer:
    """Tells a block from the others of its stack; each [] bool, or [L] for the whole stack."""

    is_first: jax.Array
    is_last: jax.Array
    is_local: jax.Array
    number: jax.Array  # int32, from 0


@flax.struct.dataclass
class SideOutputs:
    """Holds what a block gives beside the stream; of a stack, its state is stacked [L, …] and its sums are added up."""

    # What the block hands to itself in the next call, a cache for instance; None: it was given none.
    state: PyTree = None
    sums: Sums = flax.struct.field(default_factory=dict)  # auxiliary losses and metrics


class Block(nn.Module):
    """Sublayers on a residual stream.

    NOTE T5 has dropout inside the feed-forward as well; here each sublayer has it once, on its result.
    """

    config: ModelConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        layer: Layer,
        context: Context,
        state: Optional[BlockMemory] = None,
        branch: Optional[Branch] = None,
        source: Optional[jax.Array] = None,
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the stream [B, T, D], and what there is beside it.

        Args:
          state: what this layer remembers; it is returned with what was read now. None: it keeps nothing.
          branch: what the first block's output is joined with.
          source: what self-attention reads, [B, T, D]; None: the residual stream.
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
        memory = BlockMemory() if state is None else state
        attend = self_attention_of(config)(config, self.compute, context.deterministic, name="self_attention")
        ring = None if context.index is None else memory.own
        real = None if mask.query_segment_ids is None else mask.query_segment_ids > 0
        feed_forwards = [part.kind(part.config, name=part.name) for part in feed_forwards_of(config)]

        def attended(y: jax.Array) -> tuple[jax.Array, PyTree]:
            return attend(y, y if source is None else source, mask, positions, ring, context.index)

        def both(y: jax.Array) -> tuple[jax.Array, PyTree]:
            (one, own), (other, sums) = attended(y), feed_forwards[0](y, real)
            return one + other, (own, sums)

        read = None
        if config.parallel:
            x, (own, sums) = sublayer("self_attention", x, both)
        else:
            x, own = sublayer("self_attention", x, attended)
            if context.cross_mask is not None:
                x, read = self._read(x, memory, context, sublayer)
            sums: Sums = {}
            for feed_forward in feed_forwards:
                x, found = sublayer(str(feed_forward.name), x, lambda y, run=feed_forward: run(y, real))
                sums = added(sums, found)
        x = constrain(x)
        if branch is not None:
            x = jnp.where(layer.is_first, branch.join(x, config), x)
        self.sow("intermediates", "hidden", x)  # for who asks: model.apply(…, mutable=["intermediates"])
        return x, SideOutputs(None if state is None else BlockMemory(own, read), sums)

    @nn.nowrap  # whose name would stand in those of what is computed here
    def _sublayer(
        self, layer: Layer, deterministic: bool, name: str, x: jax.Array, function: Function
    ) -> tuple[jax.Array, PyTree]:
        """Returns the stream with what `function` adds, and what it gives beside that."""
        config = self.config
        norm = Norm(config, name=f"{name}_norm")
        dropout = Dropout(config.dropout_rate, deterministic=deterministic)
        if config.norm_at in ("post", "after"):
            y, beside = function(x)
            return norm(kept(x + dropout(y))) if config.norm_at == "post" else kept(x + dropout(norm(y))), beside
        y = norm(x)
        if config.norm_starts_stream and name == "self_attention":
            x = jnp.where(layer.is_first, y, x)
        y, beside = function(y)
        y = Norm(config, name=f"{name}_post_norm")(y) if config.norm_at == "both" else y
        return kept(x + dropout(y)), beside

    @nn.nowrap
    def _read(
        self, x: jax.Array, memory: BlockMemory, context: Context, sublayer: Callable
    ) -> tuple[jax.Array, PyTree]:
        """Returns the stream after attention to an encoded text, and what can be remembered of that."""
        cross = MultiHeadAttention(self.config, self.compute, context.deterministic, name="cross_attention")
        encoded = context.encoded if memory.read is None else memory.read
        return sublayer("cross_attention", x, lambda y: cross(y, encoded, context.cross_mask, PositionTerms()))
