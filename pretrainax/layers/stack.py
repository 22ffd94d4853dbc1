"""L blocks, scanned with their parameters stacked on a leading axis; the only place where layers repeat."""

from typing import Any, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask
from pretrainax.layers.block import Block, Context, Layer
from pretrainax.layers.compute import Compute
from pretrainax.layers.convolution import InputConvolution
from pretrainax.layers.mask_decoder import MaskDecoderBlock, decode_again
from pretrainax.layers.norm import Norm
from pretrainax.layers.positions import Places, positions_of

_KEPT = {  # config.train.remat -> what jax.checkpoint keeps of a block for the backward
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # of linear maps, not attention's
}


class Stack(nn.Module):
    """[B, T, D] -> [B, T, D]. Position terms of attention are computed once and shared by all blocks.

    `segment_ids` [B, T] separate what may not see each other (0: padding). In a causal stack, `prefix_mask` [B, T] is 1
    at tokens that all of their segment see. A decoder of an encoder-decoder is given `encoded` [B, S, D] and
    `encoded_segment_ids` [B, S] to read. With `absolute` [B, T, D], the last block is a mask decoder.
    """

    config: ModelConfig
    compute: Compute
    causal: bool
    num_layers: int

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        *,
        prefix_mask: Optional[jax.Array] = None,
        encoded: Optional[jax.Array] = None,
        encoded_segment_ids: Optional[jax.Array] = None,
        absolute: Optional[jax.Array] = None,
        deterministic: bool,
    ) -> jax.Array:
        config, compute = self.config, self.compute
        terms = positions_of(config).terms(Places(positions), causal=self.causal, dtype=x.dtype)
        branch = None
        if config.input_convolution is not None:
            branch = InputConvolution(config, name="convolution")(x, segment_ids, deterministic)
        window = config.window if "local" in config.layer_pattern else None
        context = Context(
            mask=Mask(self.causal, segment_ids, segment_ids, window, prefix=prefix_mask),
            positions=terms,
            branch=branch,
            absolute=absolute,
            encoded=encoded,
            cross_mask=None if encoded is None else Mask(False, segment_ids, encoded_segment_ids),
            deterministic=deterministic,
        )
        kinds = [config.layer_pattern[i % len(config.layer_pattern)] for i in range(self.num_layers)]
        layers = Layer(
            is_first=jnp.arange(self.num_layers) == 0,
            is_last=jnp.arange(self.num_layers) == self.num_layers - 1,
            is_local=jnp.asarray([kind == "local" for kind in kinds]),
        )
        if absolute is None:
            x, _ = self._blocks(Block)(config, compute, name="blocks")(x, layers, context)
        else:
            carry, _ = self._blocks(MaskDecoderBlock)(config, compute, name="blocks")((x, x), layers, context)
            rngs = {} if deterministic else {"dropout": self.make_rng("dropout")}
            x = decode_again(config, compute, self.variables["params"]["blocks"], carry, layers, context, rngs)
        if config.norm_at != "post":
            x = Norm(config, name="final_norm")(x)
        self.sow("intermediates", "output", x)
        return x

    def _blocks(self, block: Any) -> Any:
        """The class of all blocks. Layers that are shared (Lan et al. 2019, section 3.1) are a stack of one."""
        compute = self.compute
        unroll = min(compute.scan_unroll, self.num_layers)
        if compute.remat != "none":
            # Two loops cannot share work by accident; unrolled code can, which would undo the saving.
            block = nn.remat(block, policy=_KEPT[compute.remat], prevent_cse=compute.scan_unroll > 1)
        own = {"variable_axes": {"params": 0, "intermediates": 0}, "split_rngs": {"params": True, "dropout": True}}
        if not self.config.share_layers:
            return nn.scan(block, **own, in_axes=(0, nn.broadcast), length=self.num_layers, unroll=unroll)
        return nn.scan(
            nn.scan(block, **own, in_axes=nn.broadcast, length=1),
            variable_broadcast="params",
            variable_axes={"intermediates": 0},
            split_rngs={"params": False, "dropout": True},
            in_axes=(0, nn.broadcast),
            length=self.num_layers,
            unroll=unroll,
        )
