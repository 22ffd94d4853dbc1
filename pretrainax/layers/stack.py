"""L blocks, scanned with their parameters stacked on a leading axis; the only place where layers repeat."""

from typing import Optional

import flax.linen as nn
import jax

from pretrainax.config import ModelConfig, RelativePositionBuckets
from pretrainax.layers.attention import Mask
from pretrainax.layers.block import Block, Context
from pretrainax.layers.compute import Compute
from pretrainax.layers.norm import Norm
from pretrainax.layers.position import RelativeBias, rotary_of

_KEPT = {  # config.train.remat -> what jax.checkpoint keeps of a block for the backward
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # of linear maps, not attention's
}


class Stack(nn.Module):
    """[B, T, D] -> [B, T, D]. Position terms of attention are computed once and shared by all blocks.

    `segment_ids` [B, T] separate what may not see each other (0: padding). A decoder of an encoder-decoder is given
    `encoded` [B, S, D] and `encoded_segment_ids` [B, S] to read.
    """

    config: ModelConfig
    compute: Compute
    causal: bool

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        *,
        encoded: Optional[jax.Array] = None,
        encoded_segment_ids: Optional[jax.Array] = None,
        deterministic: bool,
    ) -> jax.Array:
        config, compute = self.config, self.compute
        bias = None
        if isinstance(config.position, RelativePositionBuckets):
            bias = RelativeBias(config, bidirectional=not self.causal, name="relative_bias")(x.shape[1])
        context = Context(
            mask=Mask(self.causal, segment_ids, segment_ids),
            bias=bias,
            rotary=rotary_of(config, positions),
            encoded=encoded,
            cross_mask=None if encoded is None else Mask(False, segment_ids, encoded_segment_ids),
            deterministic=deterministic,
        )
        block = Block
        if compute.remat != "none":
            # Two loops cannot share work by accident; unrolled code can, which would undo the saving.
            block = nn.remat(Block, policy=_KEPT[compute.remat], prevent_cse=compute.scan_unroll > 1)
        blocks = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=config.num_layers,
            unroll=min(compute.scan_unroll, config.num_layers),
        )
        x, _ = blocks(config, compute, name="blocks")(x, context)
        return Norm(config, name="final_norm")(x) if config.norm_at == "pre" else x
