"""L blocks, scanned with their parameters stacked on a leading axis; the only place where layers repeat.

Where a model writes text token by token, the time of a step is that of reading the parameters once, and a scan copies
those of each layer out of the stack before. So `Stack` also takes a tuple of the layers' parameters (`layer_by_layer`),
and then applies one after the other.
"""

from typing import Optional

import chex
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask
from pretrainax.layers.block import Block, Context, Layer, SideOutputs
from pretrainax.layers.cache import Memory
from pretrainax.layers.compute import Compute, blocks_in_a_turn
from pretrainax.layers.convolution import Branch, InputConvolution
from pretrainax.layers.feed_forward import first_dense, kinds_of_layers
from pretrainax.layers.made_again import products_saveable
from pretrainax.layers.mask_decoder import MaskDecoderBlock, decode_again
from pretrainax.layers.norm import Norm
from pretrainax.layers.pipeline import pipelined
from pretrainax.layers.positions import Places, positions_of
from pretrainax.layers.sums import Sums, added, over_layers
from pretrainax.sharding.axes import BATCH_AXES, PIPELINE_AXIS
from pretrainax.sharding.mesh import axis_size, platform
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.stages import stages_obstacle

_SAVEABLE = {  # config.train.remat -> the residuals of a block that jax.checkpoint saves for the backward
    "none": products_saveable,
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # of linear maps, not attention's
}


@flax.struct.dataclass
class Encoded:
    """A text that an encoder has read, for a decoder to read."""

    x: Optional[jax.Array]  # [B, S, D]; None: the decoder's blocks remember what they read of it
    segment_ids: jax.Array  # [B, S]; segment i of the decoder reads this segment i
    sums: Sums = flax.struct.field(default_factory=dict)  # of the encoder's blocks


class Blocks(nn.Module):
    """Applies layers one after the other, [B, T, D] -> [B, T, D]; all have parameters of the same shapes."""

    config: ModelConfig
    compute: Compute
    num_layers: int
    block: type[Block] = Block

    @property
    def numbers(self) -> range:
        """Returns the numbers of the layers, from that of the first of the stack, 0."""
        return range(self.num_layers)

    @nn.compact
    def __call__(
        self, x: jax.Array, context: Context, state: PyTree, branch: Optional[Branch]
    ) -> tuple[jax.Array, SideOutputs]:
        return self.run(x, context, state, branch)

    @nn.nowrap  # whose name would stand in those of what is computed here
    def run(
        self,
        x: jax.Array,
        context: Context,
        state: PyTree,
        branch: Optional[Branch],
        absolute: Optional[jax.Array] = None,
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the stream after the last layer, and what they give beside it; arguments as of `Stack`."""
        if self.has_variable("params", "blocks") and isinstance(self.get_variable("params", "blocks"), tuple):
            return self._one_by_one(x, context, state, branch)
        if state is None and self._lies_on_stages(len(x)):
            return self._piped(x, context), SideOutputs()
        return self._scanned(x, context, state, branch, absolute)

    @nn.nowrap
    def _scanned(
        self, x: jax.Array, context: Context, state: PyTree, branch: Optional[Branch], absolute: Optional[jax.Array]
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the stream after the last block, and what is beside it, of parameters stacked [L, …]."""
        config, compute, layers = self.config, self.compute, layers_of(self.config, self.numbers)
        count = len(self.numbers)
        if absolute is None:
            blocks = self._scan(count, self.block)(config, compute, name="blocks")
            x, side = blocks(x, layers, context, state, branch)
        else:
            blocks = self._scan(count, MaskDecoderBlock, nn.broadcast)(config, compute, name="blocks")
            carry, side = blocks((x, x), layers, context, state, branch, absolute)
            rngs = {} if context.deterministic else {"dropout": self.make_rng("dropout")}
            x, again = decode_again(config, compute, self.variables["params"]["blocks"], carry, layers, context, rngs)
        if config.share_layers:
            side = jax.tree.map(lambda s: s[:, 0], side)  # [L, 1, …] -> [L, …]
        name = str(self.name)
        sums = over_layers(side.sums, name, self.numbers[0])
        if absolute is not None:
            once = jax.tree.map(lambda s: s[None], again.sums)
            sums = added(sums, over_layers(once, f"{name}_again", self.numbers[0]))
        return x, SideOutputs(side.state, sums)

    @nn.nowrap
    def _lies_on_stages(self, rows: int) -> bool:
        """Returns whether a pipeline computes the blocks: of rows that the mesh divides, unless somebody asks for what
        is between the layers."""
        asked = self.is_initializing() or self.is_mutable_collection("intermediates")
        piped = axis_size(PIPELINE_AXIS) > 1 and stages_obstacle(self.config) is None
        return piped and not asked and rows % axis_size(BATCH_AXES) == 0

    @nn.nowrap
    def _piped(self, x: jax.Array, context: Context) -> jax.Array:
        """Returns the stream after the last block, of parameters that the mesh splits by layers."""

        def stage(params, x, layers, context, keys):
            blocks = self._scan(len(layers.number), self.block)(self.config, self.compute, parent=None, name="blocks")
            return blocks.apply({"params": params}, x, layers, context, None, None, rngs=keys)[0]

        keys = {} if context.deterministic else {"dropout": self.make_rng("dropout")}
        params, layers = self.get_variable("params", "blocks"), layers_of(self.config, self.numbers)
        return pipelined(stage, params, x, layers, context, keys, self.compute.pipeline_parts)

    @nn.nowrap
    def _one_by_one(
        self, x: jax.Array, context: Context, memory: Optional[Memory], branch: Optional[Branch]
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the same of a tuple of the layers' parameters, as `layer_by_layer` makes it; without dropout."""
        params, layers = self.get_variable("params", "blocks"), layers_of(self.config, self.numbers)
        run = self.block(self.config, self.compute, parent=None).apply
        kept, sums = [], []
        for i in range(len(self.numbers)):
            layer = jax.tree.map(lambda array, i=i: array[i], layers)
            state = None if memory is None else memory.blocks[i]
            x, side = run({"params": params[i % len(params)]}, x, layer, context, state, branch)
            kept.append(side.state)
            sums.append(side.sums)
        if memory is not None:
            memory = Memory(tuple(kept), None if memory.index is None else memory.index + 1)
        stacked = jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *sums)
        return x, SideOutputs(memory, over_layers(stacked, str(self.name), self.numbers[0]))

    def _scan(self, count: int, block: type[Block], *own_axes: object) -> type[nn.Module]:
        """Returns the class of so many blocks, called with (carry, layers, context, state, branch) and arguments of a
        block's own, which lie along `own_axes`.

        Layers that are shared (Lan et al. 2019, section 3.1) are a stack of one, applied again and again.
        """
        compute = self.compute
        unroll = blocks_in_a_turn(compute, count)
        if compute.remat != "none" or platform() != "cpu":  # arithmetic is what bounds a CPU
            # Two loops cannot share work by accident; unrolled code can, which would undo the saving.
            block = nn.remat(block, policy=_SAVEABLE[compute.remat], prevent_cse=unroll > 1)
        own = {"variable_axes": {"params": 0, "intermediates": 0}, "split_rngs": {"params": True, "dropout": True}}
        in_axes = (0, nn.broadcast, 0, nn.broadcast, *own_axes)
        if not self.config.share_layers:
            return nn.scan(block, **own, in_axes=in_axes, length=count, unroll=unroll)
        return nn.scan(
            nn.scan(block, **own, in_axes=nn.broadcast, length=1),
            variable_broadcast="params",
            variable_axes={"intermediates": 0},
            split_rngs={"params": False, "dropout": True},
            in_axes=in_axes,
            length=count,
            unroll=unroll,
        )


class Stack(Blocks, kw_only=True):
    """[B, T, D] -> [B, T, D]. Position terms of attention are computed once and shared by all blocks.

    Where experts are in all layers but the first, those are a part of their own, "dense".
    """

    causal: bool

    @property
    def numbers(self) -> range:
        return range(first_dense(self.config), self.num_layers)

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        *,
        prefix_mask: Optional[jax.Array] = None,
        encoded: Optional[Encoded] = None,
        absolute: Optional[jax.Array] = None,
        state: PyTree = None,
        deterministic: bool,
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the stream after the last block and its norm, and what the blocks give beside it.

        Args:
          x: embeddings, [B, T, D].
          positions: [B, T], from 0 in each segment.
          segment_ids: [B, T], separate what may not see each other (0: padding).
          prefix_mask: [B, T], in a causal stack 1 at tokens that all of their segment see.
          encoded: what a decoder of an encoder-decoder reads.
          absolute: [B, T, D], makes a mask decoder of the last block, which alone is told.
          state: of each block, stacked [L, …]; a `Memory` where the parameters lie layer by layer. Returned likewise.
        """
        config = self.config
        chex.assert_rank(x, 3, custom_message="the stream is [B, T, D]")
        chex.assert_shape((positions, segment_ids), x.shape[:2], custom_message="positions and segment_ids are [B, T]")
        index = state.index if isinstance(state, Memory) else None
        if index is None:
            places, mask = Places(positions), Mask(self.causal, segment_ids, segment_ids, prefix=prefix_mask)
        else:
            places, mask = Places(positions, state.longest - 1), Mask(self.causal, query_positions=positions)
        context = Context(
            mask=mask.replace(window=config.window_of(self.causal) if "local" in config.layer_pattern else None),
            positions=positions_of(config).terms(places, causal=self.causal, dtype=x.dtype),
            encoded=None if encoded is None else encoded.x,
            cross_mask=None if encoded is None else Mask(False, segment_ids, encoded.segment_ids),
            index=index,
            deterministic=deterministic,
        )
        branch = None
        if config.input_convolution is not None:
            branch = InputConvolution(config, name="convolution")(x, segment_ids, deterministic)
        before = None  # of the first layers, where those are apart
        if first := self.numbers[0]:
            (dense, _), _ = kinds_of_layers(config, self.num_layers)
            before, state = _divided(state, first)
            x, early = Blocks(dense, self.compute, first, self.block, name="dense")(x, context, before, branch)
            before = early.state
        x, side = self.run(x, context, state, branch, absolute)
        if before is not None:
            side = side.replace(state=_joined(before, side.state))
        if config.norm_at != "post":
            x = Norm(config, name="final_norm")(x)
        self.sow("intermediates", "output", x)
        return x, side


def layers_of(config: ModelConfig, numbers: range) -> Layer:
    """Returns what tells layers of these numbers, the last of a stack, or the first, from each other; [L] each."""
    pattern = config.layer_pattern
    return Layer(
        is_first=jnp.asarray([i == 0 for i in numbers]),
        is_last=jnp.asarray([i == numbers[-1] for i in numbers]),
        is_local=jnp.asarray([pattern[i % len(pattern)] == "local" for i in numbers]),
        number=jnp.asarray(numbers),
    )


def _divided(state: PyTree, count: int) -> tuple[PyTree, PyTree]:
    """Returns the states of the first `count` blocks, and those of the others."""
    if isinstance(state, Memory):
        return state.replace(blocks=state.blocks[:count]), state.replace(blocks=state.blocks[count:])
    return jax.tree.map(lambda s: s[:count], state), jax.tree.map(lambda s: s[count:], state)


def _joined(first: PyTree, others: PyTree) -> PyTree:
    """Returns the states of all blocks."""
    if isinstance(others, Memory):
        return others.replace(blocks=first.blocks + others.blocks)
    return jax.tree.map(lambda *s: jnp.concatenate(s), first, others)


def layer_by_layer(blocks: PyTree) -> tuple[PyTree, ...]:
    """Returns the parameters of each block of a stack's, whose arrays are [L, …]."""
    return tuple(jax.tree.map(lambda x, i=i: x[i], blocks) for i in range(len(jax.tree.leaves(blocks)[0])))
