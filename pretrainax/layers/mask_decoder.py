"""The enhanced mask decoder: where a token stands in the text is told only to the last block (He et al. 2020, section
3.2).

It is the last block of a stack, applied twice with the same weights. What it reads is the output h of the block before;
what asks is h + the absolute position at first, and then its own first result (as in the released code).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.block import Block, Context, Layer
from pretrainax.layers.compute import Compute


class MaskDecoderBlock(Block):
    """A block for a scan whose last turn is the first application; carries (x, what the block read)."""

    def __call__(self, carry: tuple[jax.Array, jax.Array], layer: Layer, context: Context) -> Any:
        x, _ = carry
        queries = jnp.where(layer.is_last, x + context.absolute, x)
        y, _ = super().__call__(queries, layer, context.replace(source=x))
        return (y, x), None


def decode_again(
    config: ModelConfig, compute: Compute, blocks: Any, carry: Any, layers: Layer, context: Context, rngs: Any
) -> jax.Array:
    """The second application; `blocks` are the parameters of the stack, `carry` is what its scan gave."""
    y, read = carry
    params, layer = jax.tree.map(lambda x: x[-1], (blocks, layers))
    run = Block(config, compute, parent=None)
    return run.apply({"params": params}, y, layer, context.replace(source=read), rngs=rngs)[0]
