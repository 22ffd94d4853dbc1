"""The enhanced mask decoder: only the last block sees absolute positions (He et al. 2020, section 3.2).

It is the last block of a stack, applied twice with the same weights. Its keys and values come from the output h of the
block before. Its queries come from h + the absolute positions at first, and then from its own first result (as in the
released code).
"""

from typing import Optional

import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.block import Block, Context, Layer, SideOutputs
from pretrainax.layers.compute import Compute
from pretrainax.layers.convolution import Branch
from pretrainax.sharding.param_paths import PyTree

Carry = tuple[jax.Array, jax.Array]  # the stream, and the source of the block's keys and values; [B, T, D] each


class MaskDecoderBlock(Block):
    """A block for a scan whose last iteration is the first application of the mask decoder."""

    def __call__(
        self,
        carry: Carry,
        layer: Layer,
        context: Context,
        state: PyTree,
        branch: Optional[Branch],
        absolute: jax.Array,
    ) -> tuple[Carry, SideOutputs]:
        """Returns the carry of the scan and the side outputs.

        Args:
          absolute: [B, T, D], embeddings of the absolute positions, for the last block only.
        """
        x, _ = carry
        queries = jnp.where(layer.is_last, x + absolute, x)
        y, side = super().__call__(queries, layer, context, state, branch, source=x)
        return (y, x), side


def decode_again(
    config: ModelConfig, compute: Compute, blocks: PyTree, carry: Carry, layers: Layer, context: Context, rngs: PyTree
) -> tuple[jax.Array, SideOutputs]:
    """Returns the second application; `blocks`: parameters of the stack, `carry`: result of its scan."""
    y, read = carry
    params, layer = jax.tree.map(lambda x: x[-1], (blocks, layers))
    run = Block(config, compute, parent=None)
    return run.apply({"params": params}, y, layer, context, source=read, rngs=rngs)
