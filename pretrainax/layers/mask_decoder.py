"""The enhanced mask decoder: where a token stands in the text is told only to the last block (He et al. 2020, section
3.2).

It is the last block of a stack, applied twice with the same weights. What it reads is the output h of the block before;
what asks is h + the absolute position at first, and then its own first result (as in the released code).
"""

from typing import Optional

import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.block import Block, Context, Layer, SideOutputs
from pretrainax.layers.compute import Compute
from pretrainax.layers.convolution import Branch
from pretrainax.sharding.param_paths import PyTree

Carry = tuple[jax.Array, jax.Array]  # the stream, and what the block read of it; [B, T, D] each


class MaskDecoderBlock(Block):
    """A block for a scan whose last turn is the first application."""

    def __call__(
        self,
        carry: Carry,
        layer: Layer,
        context: Context,
        state: PyTree,
        branch: Optional[Branch],
        absolute: jax.Array,
    ) -> tuple[Carry, SideOutputs]:
        """Returns what the scan carries on; `absolute` [B, T, D] is where a token stands, for the last block alone."""
        x, _ = carry
        queries = jnp.where(layer.is_last, x + absolute, x)
        y, beside = super().__call__(queries, layer, context, state, branch, source=x)
        return (y, x), beside


def decode_again(
    config: ModelConfig, compute: Compute, blocks: PyTree, carry: Carry, layers: Layer, context: Context, rngs: PyTree
) -> tuple[jax.Array, SideOutputs]:
    """Returns the second application; `blocks` are the parameters of the stack, `carry` is what its scan gave."""
    y, read = carry
    params, layer = jax.tree.map(lambda x: x[-1], (blocks, layers))
    run = Block(config, compute, parent=None)
    return run.apply({"params": params}, y, layer, context, source=read, rngs=rngs)
