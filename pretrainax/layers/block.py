"""The one block of every family: self-attention, cross-attention where it is given something to read, feed-forward."""

from collections.abc import Callable
from typing import Optional

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask
from pretrainax.layers.compute import Compute
from pretrainax.layers.convolution import Branch
from pretrainax.layers.mlp import MLP
from pretrainax.layers.multi_head import MultiHeadAttention
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions import PositionTerms
from pretrainax.sharding.arrays import constrain


@flax.struct.dataclass
class Context:
    """What all blocks of a stack share."""

    mask: Mask  # of self-attention; its window is that of local layers
    positions: PositionTerms = PositionTerms()  # of self-attention
    branch: Optional[Branch] = None  # what the first block's output is joined with
    absolute: Optional[jax.Array] = None  # [B, T, D], what only the queries of a mask decoder know
    source: Optional[jax.Array] = None  # [B, T, D], what self-attention reads; None: the residual stream
    encoded: Optional[jax.Array] = None  # [B, S, D], what cross-attention reads
    cross_mask: Optional[Mask] = None
    deterministic: bool = flax.struct.field(pytree_node=False, default=True)  # no dropout


@flax.struct.dataclass
class Layer:
    """What tells a block from the others of its stack; each [] bool, or [L] for the whole stack."""

    is_first: jax.Array
    is_last: jax.Array
    is_local: jax.Array


class Block(nn.Module):
    """Sublayers on a residual stream x [B, T, D]. Returns (x, None), as a scan wants it.

    NOTE T5 has dropout inside the feed-forward as well; here each sublayer has it once, on its result.
    """

    config: ModelConfig
    compute: Compute

    @nn.compact
    def __call__(self, x: jax.Array, layer: Layer, context: Context) -> tuple[jax.Array, None]:
        config = self.config

        def sublayer(name: str, x: jax.Array, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
            norm = Norm(config, name=f"{name}_norm")
            dropout = nn.Dropout(config.dropout_rate, deterministic=context.deterministic)
            if config.norm_at == "post":
                return norm(x + dropout(function(x)))
            y = norm(x)
            if config.norm_starts_stream and name == "self_attention":
                x = jnp.where(layer.is_first, y, x)
            y = function(y)
            return x + dropout(Norm(config, name=f"{name}_post_norm")(y) if config.norm_at == "both" else y)

        mask, source = context.mask, context.source
        if len(set(config.layer_pattern)) > 1:
            mask = mask.replace(windowed=layer.is_local)
        positions = context.positions.in_block(config, layer.is_local, context.deterministic)
        x = constrain(x)
        attend = MultiHeadAttention(config, self.compute, name="self_attention")
        x = sublayer("self_attention", x, lambda y: attend(y, y if source is None else source, mask, positions))
        if context.encoded is not None:
            read = MultiHeadAttention(config, self.compute, name="cross_attention")
            x = sublayer("cross_attention", x, lambda y: read(y, context.encoded, context.cross_mask, PositionTerms()))
        x = constrain(sublayer("mlp", x, MLP(config, name="mlp")))
        if context.branch is not None:
            x = jnp.where(layer.is_first, context.branch.join(x, config), x)
        self.sow("intermediates", "hidden", x)  # kept for who asks: model.apply(…, mutable=["intermediates"])
        return x, None
