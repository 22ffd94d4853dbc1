"""The one block of every family: self-attention, cross-attention where it is given something to read, feed-forward."""

from collections.abc import Callable
from typing import Optional

import flax.linen as nn
import flax.struct
import jax

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask
from pretrainax.layers.compute import Compute
from pretrainax.layers.mlp import MLP
from pretrainax.layers.multi_head import MultiHeadAttention
from pretrainax.layers.norm import Norm
from pretrainax.sharding import constrain


@flax.struct.dataclass
class Context:
    """What all blocks of a stack share."""

    mask: Mask  # of self-attention
    bias: Optional[jax.Array] = None  # [1, H, T, T], on the logits of self-attention
    rotary: Optional[tuple[jax.Array, jax.Array]] = None  # cosines and sines, [B, T, K/2]
    encoded: Optional[jax.Array] = None  # [B, S, D], what cross-attention reads
    cross_mask: Optional[Mask] = None
    deterministic: bool = flax.struct.field(pytree_node=False, default=True)  # no dropout


class Block(nn.Module):
    """Sublayers on a residual stream x [B, T, D]. Returns (x, None), as a scan wants it.

    NOTE T5 has dropout inside the feed-forward as well; here each sublayer has it once, on its result.
    """

    config: ModelConfig
    compute: Compute

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> tuple[jax.Array, None]:
        def sublayer(name: str, x: jax.Array, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
            norm = Norm(self.config, name=f"{name}_norm")
            dropout = nn.Dropout(self.config.dropout_rate, deterministic=context.deterministic)
            if self.config.norm_at == "pre":
                return x + dropout(function(norm(x)))
            return norm(x + dropout(function(x)))

        x = constrain(x)
        attend = MultiHeadAttention(self.config, self.compute, name="self_attention")
        x = sublayer("self_attention", x, lambda y: attend(y, y, context.mask, context.bias, context.rotary))
        if context.encoded is not None:
            read = MultiHeadAttention(self.config, self.compute, name="cross_attention")
            x = sublayer("cross_attention", x, lambda y: read(y, context.encoded, context.cross_mask))
        x = sublayer("mlp", x, MLP(self.config, name="mlp"))
        return constrain(x), None
