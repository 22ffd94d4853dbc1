"""A stack of L blocks, scanned with their parameters stacked on a leading axis; only this module repeats layers.

In token-by-token generation, the time of a step is the time of reading the parameters once. A scan first copies the
parameters of each layer out of the stacked arrays. `Stack` therefore also accepts the parameters as a tuple with one
tree per layer (`layer_by_layer`). It then applies one layer after the other without a scan.
"""

import functools
from typing import Optional, Union

import chex
import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask
from pretrainax.layers.block import Block, Context, Layer, SideOutputs
from pretrainax.layers.cache import KVCache
from pretrainax.layers.compute import Compute, blocks_per_iteration
from pretrainax.layers.convolution import Branch, InputConvolution
from pretrainax.layers.feed_forward import layer_groups
from pretrainax.layers.mask_decoder import MaskDecoderBlock, decode_again
from pretrainax.layers.norm import Norm
from pretrainax.layers.one_forward_one_backward import LossStage, one_forward_one_backward
from pretrainax.layers.pipeline import Keys, run_pipeline
from pretrainax.layers.positions import AttentionPositions, positions_for
from pretrainax.layers.rematerialization import converted_saveable, products_saveable
from pretrainax.layers.sums import Sums, add_sums, sum_over_layers
from pretrainax.sharding.axes import BATCH_AXES, PIPELINE_AXIS
from pretrainax.sharding.mesh import axis_size, platform
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.stages import stages_obstacle

_SAVEABLE = {  # config.train.remat -> the residuals of a block that jax.checkpoint saves for the backward
    "none": products_saveable,
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # outputs of linear layers, not of attention
}

# How a loop over layers treats parameters, sown intermediates and random keys, which differ between layers, and the
# arguments (layers, context, state, branch).
_PER_LAYER = {
    "variable_axes": {"params": 0, "intermediates": 0},
    "split_rngs": {"params": True, "dropout": True},
    "check_constancy_invariants": False,  # this check of shared variables would trace each block twice
}
_IN_AXES = (0, nn.broadcast, 0, nn.broadcast)


@flax.struct.dataclass
class EncoderOutput:
    """The output of an encoder, which the decoder reads with cross-attention."""

    x: Optional[jax.Array]  # [B, S, D]; None: its keys and values are in the KV cache of the decoder
    segment_ids: jax.Array  # [B, S], segment i of the decoder reads segment i; or lengths [B], as in `Stack`
    sums: Sums = flax.struct.field(default_factory=dict)  # losses and metrics of the encoder's blocks


class Blocks(nn.Module):
    """Applies layers one after the other, [B, T, D] -> [B, T, D]; the parameters of all layers have the same shapes."""

    config: ModelConfig
    compute: Compute
    num_layers: int
    unroll: Optional[int]  # blocks in each iteration of the loop; None: no loop, all layers are unrolled
    block: type[Block] = Block

    @nn.compact
    def __call__(
        self, x: jax.Array, layers: Layer, context: Context, state: PyTree, branch: Optional[Branch]
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the stream after the last layer, and the side outputs of each layer, [L, …].

        Args:
          layers: flags of the layers, [L] each. The other arguments are the same as in `Block`.
        """
        blocks = scan_blocks(self.block, self.config, self.compute, self.num_layers, self.unroll)
        return blocks(self.config, self.compute, name="blocks")(x, layers, context, state, branch)


class Period(nn.Module):
    """Applies the layers of one period, if layers alternate: some without experts, then one with experts."""

    before: Blocks
    last: nn.Module  # the layer with experts, with parameters [1, …]

    def __call__(
        self, x: jax.Array, layers: Layer, context: Context, state: PyTree, branch: Optional[Branch]
    ) -> tuple[jax.Array, SideOutputs]:
        (early, early_state), (late, late_state) = _split((layers, state), self.before.num_layers)
        x, early = self.before(x, early, context, early_state, branch)
        x, late = self.last(x, late, context, late_state, branch)
        return x, late.replace(state=_concatenate(early.state, late.state))


class Stack(nn.Module):
    """A stack of blocks, [B, T, D] -> [B, T, D], with the parts that the blocks share.

    The position terms of attention are computed once for all blocks.

    If only some layers have experts, the other layers are a separate parameter group: "dense" if they are the first
    layers, or "between" if they alternate with layers that have experts.
    """

    config: ModelConfig
    compute: Compute
    num_layers: int
    causal: bool
    block: type[Block] = Block

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        *,
        prefix_mask: Optional[jax.Array] = None,
        encoded: Optional[EncoderOutput] = None,
        ending: Union[jax.Array, LossStage, None] = None,
        state: PyTree = None,
        deterministic: bool,
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the stream after the last block and the final norm, and the side outputs of the blocks.

        Args:
          x: embeddings, [B, T, D].
          positions: [B, T], from 0 in each segment.
          segment_ids: [B, T], ids of segments that must not attend to each other (0: padding); or [B], the length of
            the single segment of each row.
          prefix_mask: [B, T], 1 at tokens that their whole segment attends to, in a causal stack or in a stack with
            windows.
          encoded: the output of the encoder, in the decoder of an encoder-decoder.
          ending: [B, T, D], absolute positions for the last block, which becomes a mask decoder. Or a `LossStage` for a
            pipeline: its objective [] is returned instead of the stream.
          state: of the blocks, [L, …]; a `KVCache` if the parameters are a tuple of layers. Returned likewise.
        """
        config = self.config
        chex.assert_rank(x, 3, custom_message="the stream is [B, T, D]")
        segment_ids, single_segment = _segments(segment_ids, x.shape[1])
        chex.assert_shape((positions, segment_ids), x.shape[:2], custom_message="positions and segment_ids are [B, T]")
        index = state.index if isinstance(state, KVCache) else None
        before = 0 if index is None else state.longest - 1
        places = AttentionPositions(positions, before, state.reach if isinstance(state, KVCache) else None)
        whole = Mask(self.causal, segment_ids, segment_ids, single_segment=single_segment, prefix=prefix_mask)
        mask = whole if index is None else Mask(self.causal, query_positions=positions)
        context = Context(
            mask=mask.replace(window=config.window if "local" in config.layer_pattern else None),
            positions=positions_for(config).terms(places, causal=self.causal, dtype=x.dtype),
            encoded=None if encoded is None else encoded.x,
            cross_mask=None if encoded is None else _cross_mask(segment_ids, single_segment, encoded),
            index=index,
            deterministic=deterministic,
        )
        if isinstance(ending, LossStage):
            return self._loss_on_stages(x, context, ending)
        branch = None
        if config.input_convolution is not None:
            branch = InputConvolution(config, name="convolution")(x, segment_ids, deterministic)
        if self.has_variable("params", "blocks") and isinstance(self.get_variable("params", "blocks"), tuple):
            x, side = self._unrolled(x, context, state, branch)
        elif state is None and self._uses_pipeline(len(x)):
            x, side = self._pipelined(x, context), SideOutputs()
        elif config.experts is not None and config.experts.every is not None:
            x, side = self._alternating(x, context, state, branch)
        else:
            x, side = self._scanned(x, context, state, branch, ending)
        if config.norm_at != "post":
            x = Norm(config, name="final_norm")(x)
        self.sow("intermediates", "output", x)
        return x, side

    @nn.nowrap  # keeps the name of the method out of Flax's scopes
    def _scanned(
        self, x: jax.Array, context: Context, state: PyTree, branch: Optional[Branch], absolute: Optional[jax.Array]
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the stream after the last block, and the side outputs, for parameters that are stacked [L, …].

        Args:
          absolute: absolute positions for the last block, which becomes a mask decoder; None: no mask decoder.
        """
        config, compute, name = self.config, self.compute, str(self.name)
        dense, others = layer_groups(config, self.num_layers)
        unroll = self._unroll()
        layers, early = layer_flags(config, self.num_layers), None
        if dense.numbers:
            (early_layers, early_state), (layers, state) = _split((layers, state), len(dense.numbers))
            blocks = Blocks(dense.config, compute, len(dense.numbers), unroll, self.block, name=dense.part)
            x, early = blocks(x, early_layers, context, early_state, branch)
        if absolute is None:
            blocks = scan_blocks(self.block, config, compute, len(others.numbers), unroll)
            x, side = blocks(config, compute, name="blocks")(x, layers, context, state, branch)
        else:
            blocks = scan_blocks(MaskDecoderBlock, config, compute, len(others.numbers), unroll, nn.broadcast)
            carry, side = blocks(config, compute, name="blocks")((x, x), layers, context, state, branch, absolute)
            rngs = {} if context.deterministic else {"dropout": self.make_rng("dropout")}
            x, second = decode_again(config, compute, self.variables["params"]["blocks"], carry, layers, context, rngs)
        if config.share_layers:
            side = jax.tree.map(lambda s: s[:, 0], side)  # [L, 1, …] -> [L, …]
        sums = sum_over_layers(side.sums, name, others.numbers)
        if absolute is not None:
            once = jax.tree.map(lambda s: s[None], second.sums)
            sums = add_sums(sums, sum_over_layers(once, f"{name}_again", others.numbers))
        return x, SideOutputs(side.state if early is None else _concatenate(early.state, side.state), sums)

    @nn.nowrap
    def _alternating(
        self, x: jax.Array, context: Context, state: PyTree, branch: Optional[Branch]
    ) -> tuple[jax.Array, SideOutputs]:
        """Computes the same as `_scanned` if each period has some layers without experts, then one with experts.

        This is one scan over n periods. The parameters of each kind of layer are stacked as in every stack, [l, …].
        Each period uses l / n of them.
        """
        compute, (dense, mixed) = self.compute, layer_groups(self.config, self.num_layers)
        periods, unroll = len(mixed.numbers), self._unroll()
        early = Blocks(dense.config, compute, len(dense.numbers) // periods, unroll, self.block, name=dense.part)
        last = scan_blocks(self.block, mixed.config, compute, 1, unroll)(mixed.config, compute, name="blocks")
        # [l, …] -> [n, l / n, …], and back
        cut = functools.partial(jax.tree.map, lambda a: a.reshape(periods, -1, *a.shape[1:]))
        join = functools.partial(jax.tree.map, lambda a: a.reshape(-1, *a.shape[2:]))
        unrolled_periods = periods if unroll is None else max(1, unroll * periods // self.num_layers)
        run = nn.scan(Period, **_PER_LAYER, in_axes=_IN_AXES, length=periods, unroll=unrolled_periods)
        run = nn.map_variables(run, "params", cut, join, init=self.is_initializing())
        layers = layer_flags(self.config, self.num_layers)
        x, side = run(early, last, name="turns")(x, cut(layers), context, cut(state), branch)
        return x, SideOutputs(join(side.state), sum_over_layers(join(side.sums), str(self.name), mixed.numbers))

    @nn.nowrap
    def _unroll(self) -> Optional[int]:
        """Returns the number of blocks in each iteration of the loop over layers; None: no loop."""
        unroll = blocks_per_iteration(self.compute, self.num_layers)
        return unroll if unroll < self.num_layers else None

    @nn.nowrap
    def _uses_pipeline(self, rows: int) -> bool:
        """Returns True if a pipeline computes the blocks.

        This requires a mesh with several pipeline stages, a model that supports them, and a number of rows that the
        mesh divides. No caller may need the intermediates between layers.
        """
        needs_intermediates = self.is_initializing() or self.is_mutable_collection("intermediates")
        has_stages = axis_size(PIPELINE_AXIS) > 1 and stages_obstacle(self.config) is None
        return has_stages and not needs_intermediates and rows % axis_size(BATCH_AXES) == 0

    @nn.nowrap
    def _pipelined(self, x: jax.Array, context: Context) -> jax.Array:
        """Returns the stream after the last block, computed by pipeline stages that each have a part of the layers."""
        return run_pipeline(self._stage, *self._on_stages(x, context))

    @nn.nowrap
    def _loss_on_stages(self, x: jax.Array, context: Context, ending: LossStage) -> tuple[jax.Array, SideOutputs]:
        """Runs the pipeline with `ending` after the last block, and returns the objective and the sums of the loss."""
        params = {name: tree for name, tree in self.variables["params"].items() if name == "final_norm"}

        def run(params, x, tokens):
            if "final_norm" in params:
                x = Norm(self.config, parent=None).apply({"params": params["final_norm"]}, x)
            return ending.run(params, x, tokens)

        own = LossStage(run, {**ending.params, **params}, ending.tokens)
        objective, sums = one_forward_one_backward(self._stage, own, *self._on_stages(x, context))
        return objective, SideOutputs(sums=sums)

    @nn.nowrap
    def _stage(self, params: PyTree, x: jax.Array, layers: Layer, context: Context, keys: Keys) -> jax.Array:
        """Returns the stream after the blocks of one pipeline stage.

        Args:
          params: parameters of the stage's blocks, [L/P, …].
        """
        count = len(layers.number)
        run = scan_blocks(self.block, self.config, self.compute, count, blocks_per_iteration(self.compute, count))
        blocks = run(self.config, self.compute, parent=None, name="blocks")
        return blocks.apply({"params": params}, x, layers, context, None, None, rngs=keys)[0]

    @nn.nowrap
    def _on_stages(self, x: jax.Array, context: Context) -> tuple[PyTree, jax.Array, Layer, Context, Keys, int]:
        """Returns the arguments of a pipeline: parameters, stream, layers, context, keys, number of microbatches."""
        keys = {} if context.deterministic else {"dropout": self.make_rng("dropout")}
        layers = layer_flags(self.config, self.num_layers)
        return self.get_variable("params", "blocks"), x, layers, context, keys, self.compute.pipeline_microbatches

    @nn.nowrap
    def _unrolled(
        self, x: jax.Array, context: Context, memory: Optional[KVCache], branch: Optional[Branch]
    ) -> tuple[jax.Array, SideOutputs]:
        """Computes the same as `_scanned` from the tuple of `layer_by_layer`, without dropout.

        Args:
          memory: the KV cache, whose index is advanced by one token; None: no cache.
        """
        layers, kinds = layer_flags(self.config, self.num_layers), layer_groups(self.config, self.num_layers)
        states: list[PyTree] = [None] * self.num_layers
        sums = []
        for i in range(self.num_layers):
            kind = next(kind for kind in kinds if i in kind.numbers)
            params = self.variables["params"][kind.part]["blocks"] if kind.part else self.variables["params"]["blocks"]
            run = self.block(kind.config, self.compute, parent=None).apply
            layer = jax.tree.map(lambda array, i=i: array[i], layers)
            state = None if memory is None else memory.blocks[i]
            variables = {"params": params[kind.numbers.index(i) % len(params)]}
            x, side = run(variables, x, layer, context, state, branch)
            states[i] = side.state
            sums += [side.sums] if kind is kinds[1] else []
        if memory is not None:
            memory = memory.replace(blocks=tuple(states), index=None if memory.index is None else memory.index + 1)
        stacked = jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *sums)
        return x, SideOutputs(memory, sum_over_layers(stacked, str(self.name), kinds[1].numbers))


def _segments(segment_ids: jax.Array, length: int) -> tuple[jax.Array, bool]:
    """Returns segment ids [B, T], and True if each row has a single segment.

    Args:
      segment_ids: segment ids [B, T], or the lengths [B] of the single segments.
      length: T.
    """
    if segment_ids.ndim == 2:
        return segment_ids, False
    # [1, T] < [B, 1] -> [B, T]
    return (jnp.arange(length)[None] < segment_ids[:, None]).astype(jnp.int32), True


def _cross_mask(segment_ids: jax.Array, single_segment: bool, encoded: EncoderOutput) -> Mask:
    """Returns the mask with which the decoder's tokens [B, T] attend to an encoded sequence."""
    read, alone = _segments(encoded.segment_ids, 0 if encoded.x is None else encoded.x.shape[1])
    return Mask(False, segment_ids, read, single_segment=single_segment and alone)


def scan_blocks(
    block: type[Block], config: ModelConfig, compute: Compute, length: int, unroll: Optional[int], *own_axes: object
) -> type[nn.Module]:
    """Returns the class of a loop over `length` blocks.

    It is called with (carry, layers, context, state, branch) and further arguments. Shared layers (Lan et al. 2019,
    section 3.1) are a stack of one layer, which is applied repeatedly.

    Args:
      unroll: blocks in each iteration of the loop; None: no loop, and no loop around these blocks.
      own_axes: the scan axes of the further arguments of the block.
    """
    if compute.remat != "none" or platform() != "cpu":  # arithmetic limits the speed of a CPU
        policy = _SAVEABLE[compute.remat]
        if unroll is None:
            policy = jax.checkpoint_policies.save_from_both_policies(policy, converted_saveable)
        # In unrolled code, the compiler could merge the recomputation with the forward, which would undo the
        # rematerialization. It cannot merge two loops.
        block = nn.remat(block, policy=policy, prevent_cse=unroll != 1)
    loop = {"in_axes": (*_IN_AXES, *own_axes), "length": length, "unroll": min(unroll or length, length)}
    if not config.share_layers:
        return nn.scan(block, **_PER_LAYER, **loop)
    return nn.scan(
        nn.scan(block, **_PER_LAYER, in_axes=nn.broadcast, length=1),
        variable_broadcast="params",
        variable_axes={"intermediates": 0},
        split_rngs={"params": False, "dropout": True},
        **loop,
    )


def layer_flags(config: ModelConfig, count: int) -> Layer:
    """Returns the flags and the numbers of the `count` layers of a stack, [L] each."""
    pattern = config.layer_pattern
    return Layer(
        is_first=jnp.asarray([i == 0 for i in range(count)]),
        is_last=jnp.asarray([i == count - 1 for i in range(count)]),
        is_local=jnp.asarray([pattern[i % len(pattern)] == "local" for i in range(count)]),
        number=jnp.arange(count),
    )


def _split(of_layers: PyTree, count: int) -> tuple[PyTree, PyTree]:
    """Splits arrays [L, …] into the arrays of the first `count` layers and the arrays of the other layers."""
    return jax.tree.map(lambda s: s[:count], of_layers), jax.tree.map(lambda s: s[count:], of_layers)


def _concatenate(first: PyTree, others: PyTree) -> PyTree:
    """Concatenates the arrays of two groups of layers along the layer axis."""
    return jax.tree.map(lambda *s: jnp.concatenate(s), first, others)


def layer_by_layer(blocks: PyTree) -> tuple[PyTree, ...]:
    """Splits the parameters [L, …] of a stack's blocks into a tuple with one tree per block."""
    return tuple(jax.tree.map(lambda x, i=i: x[i], blocks) for i in range(len(jax.tree.leaves(blocks)[0])))
