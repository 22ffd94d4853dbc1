"""A stack of L blocks, scanned with their parameters stacked on a leading axis; no other module loops over layers.

In token-by-token generation, a step takes as long as reading the parameters once. A scan first copies the parameters of
each layer out of the stacked arrays. `Stack` therefore also accepts the parameters as a tuple with one tree per layer
(`layer_by_layer`), and then applies the layers one after the other without a scan.
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
from pretrainax.layers.block import AuxOutputs, Block, Context, Layer
from pretrainax.layers.cache import KVCache
from pretrainax.layers.compute import Compute, blocks_per_iteration
from pretrainax.layers.convolution import Branch, InputConvolution
from pretrainax.layers.feed_forward import layer_groups
from pretrainax.layers.layer_kinds import apply_by_kind
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
    """The output of an encoder, to which the decoder attends with cross-attention."""

    x: Optional[jax.Array]  # [B, S, D]; None: the decoder's KV cache contains its keys and values
    segment_ids: jax.Array  # [B, S], the decoder's segment i attends to segment i; or lengths [B], as in `Stack`
    sums: Sums = flax.struct.field(default_factory=dict)  # losses and metrics of the encoder's blocks


class Blocks(nn.Module):
    """Applies layers whose parameters have the same shapes, one after the other: [B, T, D] -> [B, T, D]."""

    config: ModelConfig
    compute: Compute
    num_layers: int
    unroll: Optional[int]  # blocks per iteration of the loop; None: no loop, all layers are unrolled
    block: type[Block] = Block

    @nn.compact
    def __call__(
        self, x: jax.Array, layers: Layer, context: Context, state: PyTree, branch: Optional[Branch]
    ) -> tuple[jax.Array, AuxOutputs]:
        """Returns the hidden states after the last layer, and the auxiliary outputs of all layers, stacked as [L, …].

        Args:
          layers: per-layer flags, [L] each. The other arguments are as in `Block`.
        """
        blocks = scan_blocks(self.block, self.config, self.compute, self.num_layers, self.unroll)
        return blocks(self.config, self.compute, name="blocks")(x, layers, context, state, branch)


class Period(nn.Module):
    """Applies one period of a model in which several layers without experts alternate with one layer with experts."""

    before: Blocks
    last: nn.Module  # the layer with experts, with parameters [1, …]

    def __call__(
        self, x: jax.Array, layers: Layer, context: Context, state: PyTree, branch: Optional[Branch]
    ) -> tuple[jax.Array, AuxOutputs]:
        (dense, dense_state), (expert, expert_state) = _split_layers((layers, state), self.before.num_layers)
        x, dense = self.before(x, dense, context, dense_state, branch)
        x, expert = self.last(x, expert, context, expert_state, branch)
        return x, expert.replace(state=_concatenate(dense.state, expert.state))


class Stack(nn.Module):
    """A stack of blocks with the modules that the blocks share, [B, T, D] -> [B, T, D].

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
    ) -> tuple[jax.Array, AuxOutputs]:
        """Returns the hidden states after the last block and the final norm, and the blocks' auxiliary outputs.

        Args:
          x: embeddings, [B, T, D].
          positions: [B, T], from 0 in each segment.
          segment_ids: [B, T], ids of segments that must not attend to each other (0: padding); or [B], the length of
            the single segment of each row.
          prefix_mask: [B, T], 1 at tokens visible to their whole segment, in a causal stack or a stack with windows.
          encoded: the output of the encoder, for the decoder of an encoder-decoder.
          ending: absolute positions [B, T, D] for the last block, which becomes a mask decoder. Or a `LossStage` for a
            pipeline, which makes the call return the objective [] instead of the hidden states.
          state: state of the blocks, [L, …], or a `KVCache` if the parameters are a tuple of layers. The auxiliary
            outputs contain the updated state.
        """
        config = self.config
        chex.assert_rank(x, 3, custom_message="the stream is [B, T, D]")
        segment_ids, single_segment = _segments(segment_ids, x.shape[1])
        chex.assert_shape((positions, segment_ids), x.shape[:2], custom_message="positions and segment_ids are [B, T]")
        index = state.index if isinstance(state, KVCache) else None
        num_cached = 0 if index is None else state.longest - 1
        token_positions = AttentionPositions(positions, num_cached, segment_ids)
        sequence_mask = Mask(self.causal, segment_ids, segment_ids, single_segment=single_segment, prefix=prefix_mask)
        mask = sequence_mask if index is None else Mask(self.causal, query_positions=positions)
        context = Context(
            mask=mask.replace(window=config.window if "local" in config.layer_pattern else None),
            positions=positions_for(config).terms(token_positions, causal=self.causal, dtype=x.dtype),
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
            x, aux = self._unrolled(x, context, state, branch)
        elif state is None and self._uses_pipeline(len(x)):
            x, aux = self._pipelined(x, context), AuxOutputs()
        elif config.experts is not None and config.experts.every is not None:
            x, aux = self._alternating(x, context, state, branch)
        else:
            x, aux = self._scanned(x, context, state, branch, ending)
        if config.norm_at != "post":
            x = Norm(config, name="final_norm")(x)
        self.sow("intermediates", "output", x)
        return x, aux

    @nn.nowrap  # keeps the name of the method out of Flax's scopes
    def _scanned(
        self, x: jax.Array, context: Context, state: PyTree, branch: Optional[Branch], absolute: Optional[jax.Array]
    ) -> tuple[jax.Array, AuxOutputs]:
        """Applies blocks with stacked parameters [L, …], and returns the hidden states and the auxiliary outputs.

        Args:
          absolute: optional absolute positions for the last block, which turn it into a mask decoder.
        """
        if absolute is None and self._has_static_kinds():
            return self._by_kind(x, context, state, branch)
        config, compute, name = self.config, self.compute, str(self.name)
        dense, others = layer_groups(config, self.num_layers)
        unroll = self._unroll()
        layers, dense_aux = layer_flags(config, self.num_layers), None
        if dense.numbers:
            (dense_layers, dense_state), (layers, state) = _split_layers((layers, state), len(dense.numbers))
            blocks = Blocks(dense.config, compute, len(dense.numbers), unroll, self.block, name=dense.part)
            x, dense_aux = blocks(x, dense_layers, context, dense_state, branch)
        if absolute is None:
            blocks = scan_blocks(self.block, config, compute, len(others.numbers), unroll)
            x, aux = blocks(config, compute, name="blocks")(x, layers, context, state, branch)
        else:
            blocks = scan_blocks(MaskDecoderBlock, config, compute, len(others.numbers), unroll, nn.broadcast)
            carry, aux = blocks(config, compute, name="blocks")((x, x), layers, context, state, branch, absolute)
            rngs = {} if context.deterministic else {"dropout": self.make_rng("dropout")}
            x, second = decode_again(config, compute, self.variables["params"]["blocks"], carry, layers, context, rngs)
        if config.share_layers:
            aux = jax.tree.map(lambda s: s[:, 0], aux)  # [L, 1, …] -> [L, …]
        sums = sum_over_layers(aux.sums, name, others.numbers)
        if absolute is not None:
            second_sums = jax.tree.map(lambda s: s[None], second.sums)
            sums = add_sums(sums, sum_over_layers(second_sums, f"{name}_again", others.numbers))
        return x, AuxOutputs(aux.state if dense_aux is None else _concatenate(dense_aux.state, aux.state), sums)

    @nn.nowrap
    def _alternating(
        self, x: jax.Array, context: Context, state: PyTree, branch: Optional[Branch]
    ) -> tuple[jax.Array, AuxOutputs]:
        """Applies the layers of a stack in periods: one or more layers without experts, then one layer with experts.

        A single scan applies all n periods. For each of the two kinds of layers, the parameters of the l layers of this
        kind are stacked [l, …], and each period uses l / n of them. The result is as in `_scanned`.
        """
        compute, (dense, with_experts) = self.compute, layer_groups(self.config, self.num_layers)
        periods, unroll = len(with_experts.numbers), self._unroll()
        dense_blocks = Blocks(dense.config, compute, len(dense.numbers) // periods, unroll, self.block, name=dense.part)
        expert_block = scan_blocks(self.block, with_experts.config, compute, 1, unroll)(
            with_experts.config, compute, name="blocks"
        )
        # [l, …] -> [n, l / n, …], and the inverse
        split_periods = functools.partial(jax.tree.map, lambda a: a.reshape(periods, -1, *a.shape[1:]))
        join_periods = functools.partial(jax.tree.map, lambda a: a.reshape(-1, *a.shape[2:]))
        unrolled_periods = periods if unroll is None else max(1, unroll * periods // self.num_layers)
        run = nn.scan(Period, **_PER_LAYER, in_axes=_IN_AXES, length=periods, unroll=unrolled_periods)
        run = nn.map_variables(run, "params", split_periods, join_periods, init=self.is_initializing())
        layers = layer_flags(self.config, self.num_layers)
        x, aux = run(dense_blocks, expert_block, name="turns")(
            x, split_periods(layers), context, split_periods(state), branch
        )
        return x, AuxOutputs(
            join_periods(aux.state), sum_over_layers(join_periods(aux.sums), str(self.name), with_experts.numbers)
        )

    @nn.nowrap
    def _by_kind(
        self, x: jax.Array, context: Context, state: PyTree, branch: Optional[Branch]
    ) -> tuple[jax.Array, AuxOutputs]:
        """Applies local and global layers with static kinds; the result is as in `_scanned`."""
        params, _, layers, _, keys, _ = self._pipeline_arguments(x, context)
        x, aux = self._loop_by_kind(x, context, (params, layers, state), keys, self._unroll(), branch)
        return x, AuxOutputs(aux.state, sum_over_layers(aux.sums, str(self.name), range(self.num_layers)))

    @nn.nowrap
    def _has_static_kinds(self) -> bool:
        """Returns True if each layer of a stack with local and global layers is traced with a static kind.

        On a CPU, attention computes the window in either case, and a second block would only take time to compile.
        """
        return (
            len(set(self.config.layer_pattern)) > 1
            and platform() != "cpu"
            and not self.config.share_layers
            and not self._needs_intermediates()
            and not layer_groups(self.config, self.num_layers)[0].numbers
        )

    @nn.nowrap
    def _unroll(self) -> Optional[int]:
        """Returns the number of blocks per iteration of the loop over layers, or None if there is no loop."""
        unroll = blocks_per_iteration(self.compute, self.num_layers)
        return unroll if unroll < self.num_layers else None

    @nn.nowrap
    def _uses_pipeline(self, rows: int) -> bool:
        """Returns whether a pipeline computes the blocks.

        This requires a mesh with several pipeline stages, a model that supports them, and a number of rows that is a
        multiple of the number of devices along BATCH_AXES. It also requires that no caller needs the intermediates
        between layers.
        """
        has_stages = axis_size(PIPELINE_AXIS) > 1 and stages_obstacle(self.config) is None
        return has_stages and not self._needs_intermediates() and rows % axis_size(BATCH_AXES) == 0

    @nn.nowrap
    def _needs_intermediates(self) -> bool:
        """Returns True if the blocks must run in Flax's scan, which initializes parameters and stacks what they sow."""
        return self.is_initializing() or self.is_mutable_collection("intermediates")

    @nn.nowrap
    def _pipelined(self, x: jax.Array, context: Context) -> jax.Array:
        """Applies the blocks as pipeline stages that each hold some of the layers, and returns the hidden states."""
        return run_pipeline(self._stage, *self._pipeline_arguments(x, context))

    @nn.nowrap
    def _loss_on_stages(self, x: jax.Array, context: Context, ending: LossStage) -> tuple[jax.Array, AuxOutputs]:
        """Runs the blocks, the final norm and `ending` as a 1F1B pipeline; returns the objective and metric sums."""
        params = {name: tree for name, tree in self.variables["params"].items() if name == "final_norm"}

        def run(params, x, tokens):
            if "final_norm" in params:
                x = Norm(self.config, parent=None).apply({"params": params["final_norm"]}, x)
            return ending.run(params, x, tokens)

        loss_stage = LossStage(run, {**ending.params, **params}, ending.tokens)
        objective, sums = one_forward_one_backward(self._stage, loss_stage, *self._pipeline_arguments(x, context))
        return objective, AuxOutputs(sums=sums)

    @nn.nowrap
    def _stage(self, params: PyTree, x: jax.Array, layers: Layer, context: Context, keys: Keys) -> jax.Array:
        """Returns the hidden states after the blocks of one pipeline stage.

        Args:
          params: parameters of the stage's blocks, [L/P, …].
        """
        arrays, unroll = (params, layers, None), blocks_per_iteration(self.compute, len(layers.number))
        if self._has_static_kinds() and len(layers.number) % len(self.config.layer_pattern) == 0:
            return self._loop_by_kind(x, context, arrays, keys, unroll)[0]
        return self._loop(x, context, arrays, keys, unroll)[0]

    @nn.nowrap
    def _loop_by_kind(
        self,
        x: jax.Array,
        context: Context,
        arrays: PyTree,
        keys: Keys,
        unroll: Optional[int],
        branch: Optional[Branch] = None,
    ) -> tuple[jax.Array, AuxOutputs]:
        """Applies blocks with static kinds, the first of which has the first kind of the pattern; as in `_loop`."""
        keys = jax.tree.map(lambda key: jax.random.split(key, len(arrays[1].number)), keys)

        def loop(x, context, arrays_and_keys, unroll):
            arrays, keys = arrays_and_keys
            return self._loop(x, context, arrays, jax.tree.map(lambda key: key[0], keys), unroll, branch)

        return apply_by_kind(loop, self.config.layer_pattern, unroll, x, context, (arrays, keys))

    @nn.nowrap
    def _loop(
        self,
        x: jax.Array,
        context: Context,
        arrays: PyTree,
        keys: Keys,
        unroll: Optional[int],
        branch: Optional[Branch] = None,
    ) -> tuple[jax.Array, AuxOutputs]:
        """Applies l blocks outside Flax's scopes, and returns the hidden states and the auxiliary outputs [l, …].

        Args:
          arrays: parameters, per-layer flags and states of the blocks, [l, …] each.
          keys: random keys, from which each block derives its own keys.
          unroll: number of blocks per iteration, as in `scan_blocks`.
        """
        params, layers, state = arrays
        run = scan_blocks(self.block, self.config, self.compute, len(layers.number), unroll)
        blocks = run(self.config, self.compute, parent=None, name="blocks")
        return blocks.apply({"params": params}, x, layers, context, state, branch, rngs=keys)

    @nn.nowrap
    def _pipeline_arguments(
        self, x: jax.Array, context: Context
    ) -> tuple[PyTree, jax.Array, Layer, Context, Keys, int]:
        """Returns the pipeline's arguments: parameters, hidden states, layers, context, keys and microbatch count."""
        keys = {} if context.deterministic else {"dropout": self.make_rng("dropout")}
        layers = layer_flags(self.config, self.num_layers)
        return self.get_variable("params", "blocks"), x, layers, context, keys, self.compute.pipeline_microbatches

    @nn.nowrap
    def _unrolled(
        self, x: jax.Array, context: Context, cache: Optional[KVCache], branch: Optional[Branch]
    ) -> tuple[jax.Array, AuxOutputs]:
        """Applies blocks whose parameters are a tuple from `layer_by_layer`, one after the other and without dropout.

        The result is as in `_scanned`.

        Args:
          cache: optional KV cache, whose index is advanced by one token.
        """
        layers, groups = layer_flags(self.config, self.num_layers), layer_groups(self.config, self.num_layers)
        states: list[PyTree] = [None] * self.num_layers
        sums = []
        for i in range(self.num_layers):
            group = next(group for group in groups if i in group.numbers)
            params = (
                self.variables["params"][group.part]["blocks"] if group.part else self.variables["params"]["blocks"]
            )
            apply_block = self.block(group.config, self.compute, parent=None).apply
            layer = jax.tree.map(lambda array, i=i: array[i], layers)
            state = None if cache is None else cache.blocks[i]
            variables = {"params": params[group.numbers.index(i) % len(params)]}
            x, aux = apply_block(variables, x, layer, context, state, branch)
            states[i] = aux.state
            sums += [aux.sums] if group is groups[1] else []
        if cache is not None:
            cache = cache.replace(blocks=tuple(states), index=None if cache.index is None else cache.index + 1)
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *sums)
        return x, AuxOutputs(cache, sum_over_layers(stacked, str(self.name), groups[1].numbers))


def _segments(segment_ids: jax.Array, length: int) -> tuple[jax.Array, bool]:
    """Returns segment ids [B, T], and whether each row has a single segment.

    Args:
      segment_ids: segment ids [B, T], or the length [B] of each row's single segment.
      length: number of tokens per row, T.
    """
    if segment_ids.ndim == 2:
        return segment_ids, False
    # [1, T] < [B, 1] -> [B, T]
    return (jnp.arange(length)[None] < segment_ids[:, None]).astype(jnp.int32), True


def _cross_mask(segment_ids: jax.Array, single_segment: bool, encoded: EncoderOutput) -> Mask:
    """Builds the cross-attention mask for the decoder's tokens [B, T] and the encoded sequence."""
    source_ids, single_source = _segments(encoded.segment_ids, 0 if encoded.x is None else encoded.x.shape[1])
    return Mask(False, segment_ids, source_ids, single_segment=single_segment and single_source)


def scan_blocks(
    block: type[Block], config: ModelConfig, compute: Compute, length: int, unroll: Optional[int], *extra_axes: object
) -> type[nn.Module]:
    """Returns a module class that loops over `length` blocks.

    The module is called with (carry, layers, context, state, branch) and any additional arguments. Shared layers (Lan
    et al. 2019, section 3.1) are a stack of one layer, which is applied repeatedly.

    Args:
      unroll: number of blocks per iteration of the loop. If None, this loop and all enclosing loops are fully unrolled.
      extra_axes: the scan axes of the block's additional arguments.
    """
    if compute.remat != "none" or platform() != "cpu":  # arithmetic limits the speed of a CPU
        policy = _SAVEABLE[compute.remat]
        if unroll is None:
            policy = jax.checkpoint_policies.save_from_both_policies(policy, converted_saveable)
        # In unrolled code, the compiler could merge the recomputation with the forward, which would undo the
        # rematerialization. It cannot merge two loops.
        block = nn.remat(block, policy=policy, prevent_cse=unroll != 1)
    loop_options = {"in_axes": (*_IN_AXES, *extra_axes), "length": length, "unroll": min(unroll or length, length)}
    if not config.share_layers:
        return nn.scan(block, **_PER_LAYER, **loop_options)
    return nn.scan(
        nn.scan(block, **_PER_LAYER, in_axes=nn.broadcast, length=1),
        variable_broadcast="params",
        variable_axes={"intermediates": 0},
        split_rngs={"params": False, "dropout": True},
        **loop_options,
    )


def layer_flags(config: ModelConfig, count: int) -> Layer:
    """Builds the per-layer flags and indices of a stack with `count` layers, [L] each."""
    pattern = config.layer_pattern
    return Layer(
        is_first=jnp.asarray([i == 0 for i in range(count)]),
        is_last=jnp.asarray([i == count - 1 for i in range(count)]),
        is_local=jnp.asarray([pattern[i % len(pattern)] == "local" for i in range(count)]),
        number=jnp.arange(count),
    )


def _split_layers(arrays: PyTree, count: int) -> tuple[PyTree, PyTree]:
    """Splits arrays [L, …] into those of the first `count` layers and those of the remaining layers."""
    return jax.tree.map(lambda s: s[:count], arrays), jax.tree.map(lambda s: s[count:], arrays)


def _concatenate(first: PyTree, rest: PyTree) -> PyTree:
    """Concatenates the arrays of two groups of layers along the layer axis."""
    return jax.tree.map(lambda *s: jnp.concatenate(s), first, rest)


def layer_by_layer(blocks: PyTree) -> tuple[PyTree, ...]:
    """Splits the parameters [L, …] of a stack's blocks into a tuple with one tree per block."""
    return tuple(jax.tree.map(lambda x, i=i: x[i], blocks) for i in range(len(jax.tree.leaves(blocks)[0])))
