"""L blocks, scanned with their parameters stacked on a leading axis; the only place where layers repeat.

Where a model writes text token by token, the time of a step is that of reading the parameters once, and a scan copies
those of each layer out of the stack before. So `Stack` also takes a tuple of the layers' parameters (`layer_by_layer`),
and then applies one after the other.
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
from pretrainax.layers.cache import Memory
from pretrainax.layers.compute import Compute, blocks_in_a_turn
from pretrainax.layers.convolution import Branch, InputConvolution
from pretrainax.layers.feed_forward import kinds_of_layers
from pretrainax.layers.made_again import converted_saveable, products_saveable
from pretrainax.layers.mask_decoder import MaskDecoderBlock, decode_again
from pretrainax.layers.norm import Norm
from pretrainax.layers.one_forward_one_backward import Ending, one_forward_one_backward
from pretrainax.layers.pipeline import Keys, pipelined
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

# What a loop over layers has of each layer: parameters, what is sown, keys; (layers, context, state, branch).
_OWN = {
    "variable_axes": {"params": 0, "intermediates": 0},
    "split_rngs": {"params": True, "dropout": True},
    "check_constancy_invariants": False,  # which traces each block twice, for variables that all layers share
}
_IN_AXES = (0, nn.broadcast, 0, nn.broadcast)


@flax.struct.dataclass
class Encoded:
    """A text that an encoder has read, for a decoder to read."""

    x: Optional[jax.Array]  # [B, S, D]; None: the decoder's blocks remember what they read of it
    segment_ids: jax.Array  # [B, S]; segment i of the decoder reads this segment i; or [B], as in `Stack`
    sums: Sums = flax.struct.field(default_factory=dict)  # of the encoder's blocks


class Blocks(nn.Module):
    """Applies layers one after the other, [B, T, D] -> [B, T, D]; all have parameters of the same shapes."""

    config: ModelConfig
    compute: Compute
    num_layers: int
    unroll: Optional[int]  # blocks of the stack in a turn of its loop; None: there is no loop
    block: type[Block] = Block

    @nn.compact
    def __call__(
        self, x: jax.Array, layers: Layer, context: Context, state: PyTree, branch: Optional[Branch]
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the stream after the last layer, and what each gives beside it, [L, …]; layers: [L] each."""
        blocks = scanned(self.block, self.config, self.compute, self.num_layers, self.unroll)
        return blocks(self.config, self.compute, name="blocks")(x, layers, context, state, branch)


class Turn(nn.Module):
    """Applies the layers of a turn: some without experts, and one with them."""

    before: Blocks
    last: nn.Module  # of [1, …]

    def __call__(
        self, x: jax.Array, layers: Layer, context: Context, state: PyTree, branch: Optional[Branch]
    ) -> tuple[jax.Array, SideOutputs]:
        (early, early_state), (late, late_state) = _divided((layers, state), self.before.num_layers)
        x, early = self.before(x, early, context, early_state, branch)
        x, late = self.last(x, late, context, late_state, branch)
        return x, late.replace(state=_joined(early.state, late.state))


class Stack(nn.Module):
    """[B, T, D] -> [B, T, D]. Position terms of attention are computed once and shared by all blocks.

    Where experts are in some layers, the others are a part of their own: "dense" the first ones, "between" those that
    take turns with them.
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
        encoded: Optional[Encoded] = None,
        ending: Union[jax.Array, Ending, None] = None,
        state: PyTree = None,
        deterministic: bool,
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the stream after the last block and its norm, and what the blocks give beside it.

        Args:
          x: embeddings, [B, T, D].
          positions: [B, T], from 0 in each segment.
          segment_ids: [B, T], separate what may not see each other (0: padding); or [B], how long a row's one text is.
          prefix_mask: [B, T], 1 at tokens that all of their segment see: in a causal stack, or one of windows.
          encoded: what a decoder of an encoder-decoder reads.
          ending: [B, T, D] makes a mask decoder of the last block, which alone is told; an `Ending` a loss of the
            stream, on stages of a pipeline: its objective [] is returned for the stream, and its sums beside it.
          state: of each block, stacked [L, …]; a `Memory` where the parameters lie layer by layer. Returned likewise.
        """
        config = self.config
        chex.assert_rank(x, 3, custom_message="the stream is [B, T, D]")
        segment_ids, one_text = _segments(segment_ids, x.shape[1])
        chex.assert_shape((positions, segment_ids), x.shape[:2], custom_message="positions and segment_ids are [B, T]")
        index = state.index if isinstance(state, Memory) else None
        before = 0 if index is None else state.longest - 1
        places = Places(positions, before, state.reach if isinstance(state, Memory) else None)
        whole = Mask(self.causal, segment_ids, segment_ids, one_text=one_text, prefix=prefix_mask)
        mask = whole if index is None else Mask(self.causal, query_positions=positions)
        context = Context(
            mask=mask.replace(window=config.window if "local" in config.layer_pattern else None),
            positions=positions_of(config).terms(places, causal=self.causal, dtype=x.dtype),
            encoded=None if encoded is None else encoded.x,
            cross_mask=None if encoded is None else _cross_mask(segment_ids, one_text, encoded),
            index=index,
            deterministic=deterministic,
        )
        if isinstance(ending, Ending):
            return self._turned_round(x, context, ending)
        branch = None
        if config.input_convolution is not None:
            branch = InputConvolution(config, name="convolution")(x, segment_ids, deterministic)
        if self.has_variable("params", "blocks") and isinstance(self.get_variable("params", "blocks"), tuple):
            x, side = self._one_by_one(x, context, state, branch)
        elif state is None and self._lies_on_stages(len(x)):
            x, side = self._piped(x, context), SideOutputs()
        elif config.experts is not None and config.experts.every is not None:
            x, side = self._in_turns(x, context, state, branch)
        else:
            x, side = self._scanned(x, context, state, branch, ending)
        if config.norm_at != "post":
            x = Norm(config, name="final_norm")(x)
        self.sow("intermediates", "output", x)
        return x, side

    @nn.nowrap  # whose name would stand in those of what is computed here
    def _scanned(
        self, x: jax.Array, context: Context, state: PyTree, branch: Optional[Branch], absolute: Optional[jax.Array]
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the stream after the last block, and what is beside it, of parameters stacked [L, …]."""
        config, compute, name = self.config, self.compute, str(self.name)
        first, own = kinds_of_layers(config, self.num_layers)
        unroll = self._unroll()
        layers, early = layers_of(config, self.num_layers), None
        if first.numbers:
            (before, early_state), (layers, state) = _divided((layers, state), len(first.numbers))
            blocks = Blocks(first.config, compute, len(first.numbers), unroll, self.block, name=first.part)
            x, early = blocks(x, before, context, early_state, branch)
        if absolute is None:
            blocks = scanned(self.block, config, compute, len(own.numbers), unroll)
            x, side = blocks(config, compute, name="blocks")(x, layers, context, state, branch)
        else:
            blocks = scanned(MaskDecoderBlock, config, compute, len(own.numbers), unroll, nn.broadcast)
            carry, side = blocks(config, compute, name="blocks")((x, x), layers, context, state, branch, absolute)
            rngs = {} if context.deterministic else {"dropout": self.make_rng("dropout")}
            x, again = decode_again(config, compute, self.variables["params"]["blocks"], carry, layers, context, rngs)
        if config.share_layers:
            side = jax.tree.map(lambda s: s[:, 0], side)  # [L, 1, …] -> [L, …]
        sums = over_layers(side.sums, name, own.numbers)
        if absolute is not None:
            once = jax.tree.map(lambda s: s[None], again.sums)
            sums = added(sums, over_layers(once, f"{name}_again", own.numbers))
        return x, SideOutputs(side.state if early is None else _joined(early.state, side.state), sums)

    @nn.nowrap
    def _in_turns(
        self, x: jax.Array, context: Context, state: PyTree, branch: Optional[Branch]
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the same where layers without experts and one with them take turns: one scan of n turns of k layers.

        Parameters of each kind are stacked as everywhere, [l, …]; a turn takes l / n of them.
        """
        compute, (others, own) = self.compute, kinds_of_layers(self.config, self.num_layers)
        turns, unroll = len(own.numbers), self._unroll()
        before = Blocks(others.config, compute, len(others.numbers) // turns, unroll, self.block, name=others.part)
        last = scanned(self.block, own.config, compute, 1, unroll)(own.config, compute, name="blocks")
        # [l, …] -> [n, l / n, …], and back
        cut = functools.partial(jax.tree.map, lambda a: a.reshape(turns, -1, *a.shape[1:]))
        join = functools.partial(jax.tree.map, lambda a: a.reshape(-1, *a.shape[2:]))
        of_turns = turns if unroll is None else max(1, unroll * turns // self.num_layers)
        run = nn.scan(Turn, **_OWN, in_axes=_IN_AXES, length=turns, unroll=of_turns)
        run = nn.map_variables(run, "params", cut, join, init=self.is_initializing())
        layers = layers_of(self.config, self.num_layers)
        x, side = run(before, last, name="turns")(x, cut(layers), context, cut(state), branch)
        return x, SideOutputs(join(side.state), over_layers(join(side.sums), str(self.name), own.numbers))

    @nn.nowrap
    def _unroll(self) -> Optional[int]:
        """Returns how many blocks a turn of the loop over layers has; None: there is no loop."""
        unroll = blocks_in_a_turn(self.compute, self.num_layers)
        return unroll if unroll < self.num_layers else None

    @nn.nowrap
    def _lies_on_stages(self, rows: int) -> bool:
        """Returns True if a pipeline computes the blocks: of rows that the mesh divides, unless somebody asks for what
        is between the layers."""
        asked = self.is_initializing() or self.is_mutable_collection("intermediates")
        piped = axis_size(PIPELINE_AXIS) > 1 and stages_obstacle(self.config) is None
        return piped and not asked and rows % axis_size(BATCH_AXES) == 0

    @nn.nowrap
    def _piped(self, x: jax.Array, context: Context) -> jax.Array:
        """Returns the stream after the last block, of parameters that the mesh splits by layers."""
        return pipelined(self._stage, *self._on_stages(x, context))

    @nn.nowrap
    def _turned_round(self, x: jax.Array, context: Context, ending: Ending) -> tuple[jax.Array, SideOutputs]:
        """Returns the objective of what follows the last block, and its sums."""
        params = {name: tree for name, tree in self.variables["params"].items() if name == "final_norm"}

        def run(params, x, tokens):
            if "final_norm" in params:
                x = Norm(self.config, parent=None).apply({"params": params["final_norm"]}, x)
            return ending.run(params, x, tokens)

        own = Ending(run, {**ending.params, **params}, ending.tokens)
        objective, sums = one_forward_one_backward(self._stage, own, *self._on_stages(x, context))
        return objective, SideOutputs(sums=sums)

    @nn.nowrap
    def _stage(self, params: PyTree, x: jax.Array, layers: Layer, context: Context, keys: Keys) -> jax.Array:
        """Returns the stream after the blocks of a stage."""
        count = len(layers.number)
        run = scanned(self.block, self.config, self.compute, count, blocks_in_a_turn(self.compute, count))
        blocks = run(self.config, self.compute, parent=None, name="blocks")
        return blocks.apply({"params": params}, x, layers, context, None, None, rngs=keys)[0]

    @nn.nowrap
    def _on_stages(self, x: jax.Array, context: Context) -> tuple[PyTree, jax.Array, Layer, Context, Keys, int]:
        """Returns what a pipeline is told: parameters, stream, layers, context, keys and parts."""
        keys = {} if context.deterministic else {"dropout": self.make_rng("dropout")}
        layers = layers_of(self.config, self.num_layers)
        return self.get_variable("params", "blocks"), x, layers, context, keys, self.compute.pipeline_parts

    @nn.nowrap
    def _one_by_one(
        self, x: jax.Array, context: Context, memory: Optional[Memory], branch: Optional[Branch]
    ) -> tuple[jax.Array, SideOutputs]:
        """Returns the same of a tuple of the layers' parameters, as `layer_by_layer` makes it; without dropout."""
        layers, kinds = layers_of(self.config, self.num_layers), kinds_of_layers(self.config, self.num_layers)
        kept: list[PyTree] = [None] * self.num_layers
        sums = []
        for i in range(self.num_layers):
            kind = next(kind for kind in kinds if i in kind.numbers)
            params = self.variables["params"][kind.part]["blocks"] if kind.part else self.variables["params"]["blocks"]
            run = self.block(kind.config, self.compute, parent=None).apply
            layer = jax.tree.map(lambda array, i=i: array[i], layers)
            state = None if memory is None else memory.blocks[i]
            own = {"params": params[kind.numbers.index(i) % len(params)]}
            x, side = run(own, x, layer, context, state, branch)
            kept[i] = side.state
            sums += [side.sums] if kind is kinds[1] else []
        if memory is not None:
            memory = memory.replace(blocks=tuple(kept), index=None if memory.index is None else memory.index + 1)
        stacked = jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *sums)
        return x, SideOutputs(memory, over_layers(stacked, str(self.name), kinds[1].numbers))


def _segments(segment_ids: jax.Array, length: int) -> tuple[jax.Array, bool]:
    """Returns segment ids [B, T], and whether each row has one text, of these ids or the texts' lengths [B]."""
    if segment_ids.ndim == 2:
        return segment_ids, False
    # [1, T] < [B, 1] -> [B, T]
    return (jnp.arange(length)[None] < segment_ids[:, None]).astype(jnp.int32), True


def _cross_mask(segment_ids: jax.Array, one_text: bool, encoded: Encoded) -> Mask:
    """Returns what a decoder's tokens [B, T] see of an encoded text."""
    read, alone = _segments(encoded.segment_ids, 0 if encoded.x is None else encoded.x.shape[1])
    return Mask(False, segment_ids, read, one_text=one_text and alone)


def scanned(
    block: type[Block], config: ModelConfig, compute: Compute, length: int, unroll: Optional[int], *own_axes: object
) -> type[nn.Module]:
    """Returns the class of so many blocks, called with (carry, layers, context, state, branch) and arguments of a
    block's own, which lie along `own_axes`; unroll: blocks in a turn of the loop, None: neither here nor around is one.

    Layers that are shared (Lan et al. 2019, section 3.1) are a stack of one, applied again and again.
    """
    if compute.remat != "none" or platform() != "cpu":  # arithmetic is what bounds a CPU
        policy = _SAVEABLE[compute.remat]
        if unroll is None:
            policy = jax.checkpoint_policies.save_from_both_policies(policy, converted_saveable)
        # Two loops cannot share work by accident; unrolled code can, which would undo the saving.
        block = nn.remat(block, policy=policy, prevent_cse=unroll != 1)
    of_all = {"in_axes": (*_IN_AXES, *own_axes), "length": length, "unroll": min(unroll or length, length)}
    if not config.share_layers:
        return nn.scan(block, **_OWN, **of_all)
    return nn.scan(
        nn.scan(block, **_OWN, in_axes=nn.broadcast, length=1),
        variable_broadcast="params",
        variable_axes={"intermediates": 0},
        split_rngs={"params": False, "dropout": True},
        **of_all,
    )


def layers_of(config: ModelConfig, count: int) -> Layer:
    """Returns what tells the layers of a stack from each other; [L] each."""
    pattern = config.layer_pattern
    return Layer(
        is_first=jnp.asarray([i == 0 for i in range(count)]),
        is_last=jnp.asarray([i == count - 1 for i in range(count)]),
        is_local=jnp.asarray([pattern[i % len(pattern)] == "local" for i in range(count)]),
        number=jnp.arange(count),
    )


def _divided(of_layers: PyTree, count: int) -> tuple[PyTree, PyTree]:
    """Returns what is of the first `count` layers, and what of the others, of arrays [L, …]."""
    return jax.tree.map(lambda s: s[:count], of_layers), jax.tree.map(lambda s: s[count:], of_layers)


def _joined(first: PyTree, others: PyTree) -> PyTree:
    """Returns what is of all layers."""
    return jax.tree.map(lambda *s: jnp.concatenate(s), first, others)


def layer_by_layer(blocks: PyTree) -> tuple[PyTree, ...]:
    """Returns the parameters of each block of a stack's, whose arrays are [L, …]."""
    return tuple(jax.tree.map(lambda x, i=i: x[i], blocks) for i in range(len(jax.tree.leaves(blocks)[0])))
