"""The enhanced mask decoder: only the last block gets absolute positions (He et al. 2020, section 3.2).

The decoder is the last block of a stack, applied twice with the same weights. Both times, its keys and values are
computed from h, the output of the block before it. Its queries are computed from h + the absolute positions the first
time, and from the output of the first application the second time (as in the released code).
"""

from typing import Optional

import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.block import Block, Context, Layer, SideOutputs
from pretrainax.layers.compute import Compute
from pretrainax.layers.convolution import Branch
from pretrainax.sharding.param_paths import PyTree

Carry = tuple[jax.Array, jax.Array]  # the stream, and the input of the block's keys and values; [B, T, D] each


class MaskDecoderBlock(Block):
    """The block of a scan over layers whose last iteration is the first application of the mask decoder."""

    def __call__(
        self,
        carry: Carry,
        layer: Layer,
        context: Context,
        state: PyTree,
        branch: Optional[Branch],
        absolute: jax.Array,
    ) -> tuple[Carry, SideOutputs]:
        """Returns the carry of the scan after this block, and the side outputs of this block.

        Args:
          absolute: [B, T, D], embeddings of the absolute positions. Only the last block adds them, to the input of its
            queries.
        """
        x, _ = carry
        queries = jnp.where(layer.is_last, x + absolute, x)
        y, side = super().__call__(queries, layer, context, state, branch, source=x)
        return (y, x), side


def decode_again(
    config: ModelConfig, compute: Compute, blocks: PyTree, carry: Carry, layers: Layer, context: Context, rngs: PyTree
) -> tuple[jax.Array, SideOutputs]:
    """Returns the stream and the side outputs of the second application of the mask decoder.

    Args:
      blocks: parameters of the stack's blocks, [L, …]; the last ones are used.
      carry: the result of the scan over MaskDecoderBlocks.
      rngs: {"dropout": key}, or {} without dropout.
    """
    y, read = carry
    params, layer = jax.tree.map(lambda x: x[-1], (blocks, layers))
    run = Block(config, compute, parent=None)
    return run.apply({"params": params}, y, layer, context, source=read, rngs=rngs)
