"""A convolution over neighbouring tokens, computed in parallel to the first block.

This is the "n-gram induced input encoding" of DeBERTa v2, as in the released code.
"""

import chex
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.dropout import Dropout
from pretrainax.layers.feed_forward import ACTIVATIONS
from pretrainax.layers.linear import normal_init
from pretrainax.layers.norm import Norm


@flax.struct.dataclass
class Branch:
    """The output of the convolution, and the norm parameters for joining it with the output of the first block."""

    convolved: jax.Array  # [B, T, D], output of the convolution
    norm: dict[str, jax.Array]  # parameters of the norm that is applied to the sum

    def join(self, x: jax.Array, config: ModelConfig) -> jax.Array:
        chex.assert_equal_shape((x, self.convolved), custom_message="a block's output and its branch are [B, T, D]")
        return Norm(config, parent=None).apply({"params": self.norm}, x + self.convolved)


class InputConvolution(nn.Module):
    """Computes activation(convolution(x)) of the embeddings x [B, T, D], and returns the result as a Branch.

    The convolution covers config.input_convolution tokens, centred at each token. Tokens of other segments count as 0.

    The result is later added to the output of the first block, and a norm is applied to the sum. The norm's parameters
    belong to this module instead of the first block, because all blocks are scanned together and must have the same
    parameter structure. The Branch therefore also carries the norm parameters.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: jax.Array, deterministic: bool) -> Branch:
        config, width, size = self.config, self.config.input_convolution, x.shape[-1]
        chex.assert_shape(segment_ids, x.shape[:2], custom_message="segment_ids are [B, T] where x is [B, T, D]")
        kernel = self.param("kernel", normal_init(config, width * size), (width, size, size), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (size,), jnp.float32)
        y = jnp.broadcast_to(bias.astype(x.dtype), x.shape)
        for i in range(width):
            offset = i - width // 2
            same_segment = (_shift_tokens(segment_ids, offset) == segment_ids)[..., None]
            y += jnp.where(same_segment, _shift_tokens(x, offset), 0) @ kernel[i].astype(x.dtype)
        y = ACTIVATIONS[config.activation](Dropout(config.dropout_rate, deterministic=deterministic)(y))
        norm = Norm(config, name="norm")
        if self.is_initializing():
            norm(y)
        return Branch(y, norm.variables["params"])


def _shift_tokens(x: jax.Array, offset: int) -> jax.Array:
    """Shifts x along the token axis: out[:, t] = x[:, t + offset].

    Outside the row, the result is -1, which is not a valid segment id.
    """
    widths = [(0, 0), (max(-offset, 0), max(offset, 0))] + [(0, 0)] * (x.ndim - 2)
    padded = jnp.pad(x, widths, constant_values=-1)
    return padded[:, max(offset, 0) : max(offset, 0) + x.shape[1]]
