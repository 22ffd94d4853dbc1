"""The enhanced mask decoder: only the last block gets absolute positions (He et al. 2020, section 3.2).

The decoder is the last block of a stack, applied twice with the same weights. In both applications, keys and values are
computed from h, the output of the preceding block. The first application computes queries from h plus the absolute
positions. The second application computes queries from the output of the first (as in the released code).
"""

from typing import Optional

import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.block import AuxOutputs, Block, Context, Layer
from pretrainax.layers.compute import Compute
from pretrainax.layers.convolution import Branch
from pretrainax.sharding.param_paths import PyTree

Carry = tuple[jax.Array, jax.Array]  # the hidden states, and the input for the block's keys and values; [B, T, D] each


class MaskDecoderBlock(Block):
    """The block to scan over layers if the stack ends in a mask decoder.

    The last iteration of the scan is the first application of the mask decoder.
    """

    def __call__(
        self,
        carry: Carry,
        layer: Layer,
        context: Context,
        state: PyTree,
        branch: Optional[Branch],
        absolute: jax.Array,
    ) -> tuple[Carry, AuxOutputs]:
        """Returns the scan's carry after this block, and the block's auxiliary outputs.

        Args:
          absolute: [B, T, D], embeddings of the absolute positions. Only the last block uses them: it adds them to the
            input for the queries.
        """
        x, _ = carry
        queries = jnp.where(layer.is_last, x + absolute, x)
        y, side_outputs = super().__call__(queries, layer, context, state, branch, source=x)
        return (y, x), side_outputs


def decode_again(
    config: ModelConfig, compute: Compute, blocks: PyTree, carry: Carry, layers: Layer, context: Context, rngs: PyTree
) -> tuple[jax.Array, AuxOutputs]:
    """Applies the mask decoder a second time, and returns its hidden states and auxiliary outputs.

    Args:
      blocks: parameters of the stack's blocks, [L, …]; only the last block's parameters are used.
      carry: the result of the scan over MaskDecoderBlocks.
      layers: per-layer flags of the stack, [L] each.
      rngs: {"dropout": key}, or {} without dropout.
    """
    queries, key_source = carry
    params, layer = jax.tree.map(lambda x: x[-1], (blocks, layers))
    block = Block(config, compute, parent=None)
    return block.apply({"params": params}, queries, layer, context, source=key_source, rngs=rngs)
