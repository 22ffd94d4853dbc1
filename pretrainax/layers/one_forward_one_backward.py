"""1F1B: a pipeline that starts the backward of a microbatch as soon as the last stage has the microbatch's loss.

This schedule is PipeDream-flush (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

P stages, M microbatches and the bubble are as in `layers/pipeline.py`: there are M + P - 1 ticks with a forward and M +
P - 1 ticks with a backward. At tick t, stage s first computes microbatch t - s. It then computes the gradient of
microbatch t - 2 (P - 1) + s from the gradient that the next stage sent at the previous tick. The last stage therefore
starts the backward of a microbatch in the tick in which the microbatch arrives. The first P - 1 ticks have no backward,
and the last P - 1 ticks have no forward.

The first stage stores 2 P - 1 microbatches for any M, because all stages tick together. In the paper, stages wait only
for their neighbours and store P microbatches.

A stage saves only its input hidden states for each microbatch. The backward recomputes the stage's layers for one
microbatch at a time, with the residuals that `train.remat` selects.

When a microbatch leaves the last stage, its tokens are divided among all stages, which compute the final norm, the head
and the loss. No stage has to wait while the last stage multiplies by the vocabulary matrix.

The forward computes the gradients together with the loss. The differentiation rule only scales the gradients.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.layers.block import Context, Layer
from pretrainax.layers.pipeline import (
    Keys,
    Stage,
    between_stages,
    gather_param,
    microbatch_keys,
    shard_spec,
    split_microbatches,
)
from pretrainax.layers.sums import Sums
from pretrainax.sharding.axes import BATCH_AXES, PIPELINE_AXIS
from pretrainax.sharding.mesh import axis_size
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import param_specs

Loss: TypeAlias = tuple[jax.Array, Sums]  # the objective and the metric sums of some tokens; callers add them up


class LossStage(NamedTuple):
    """The computation of the loss from the hidden states after the last block."""

    run: Callable[[PyTree, jax.Array, dict[str, jax.Array]], Loss]  # (params, x [1, n, D], tokens [1, n]) -> loss
    params: PyTree  # the parameters that `run` takes
    tokens: dict[str, jax.Array]  # [B, T] each, per-token inputs of `run`


class _Gradients(NamedTuple):
    """Gradients of one stage, summed over microbatches."""

    blocks: PyTree
    ending: PyTree
    shared: dict[int, jax.Array]  # gradients of context arrays that all rows share, by array index
    x: jax.Array  # [n, T, D], gradient of the embeddings of this device's rows


class _State(NamedTuple):
    """The state that a stage carries from tick to tick."""

    forward: jax.Array  # [b, T, D], hidden states from the previous stage
    backward: jax.Array  # [b, T, D], gradient from the next stage
    inputs: jax.Array  # [2 P - 1, b, T, D]: stage inputs, saved until their backward
    gradients: _Gradients
    loss: Loss


def one_forward_one_backward(
    stage: Stage,
    ending: LossStage,
    params: PyTree,
    x: jax.Array,
    layers: Layer,
    context: Context,
    keys: Keys,
    parts: int,
) -> Loss:
    """Computes the loss of all rows, and its gradients in the same pass, under the current mesh (`jax.set_mesh`).

    The loss consists of the objective and the metric sums that `ending` computes. Context arrays with a row axis depend
    only on the batch and have no gradient. A bias that all rows share has a gradient. The other arguments are as in
    `layers.pipeline.run_pipeline`.

    Args:
      ending: the loss computation after the last block.
    """
    trained = {"blocks": params, "ending": ending.params}
    specs = param_specs(trained)
    shards, rows = jax.tree.map(shard_spec, specs), P(BATCH_AXES)
    leaves, structure = jax.tree.flatten(context)
    arrays = dict(enumerate(leaves))
    by_row = {i for i, a in arrays.items() if a.ndim > 1 and a.shape[0] == len(x)}
    shared = {i: a for i, a in arrays.items() if i not in by_row and jnp.issubdtype(a.dtype, jnp.floating)}
    constant = {i: a for i, a in arrays.items() if i not in shared}

    def on_stage(trained, x, shared, constant, layers, tokens, keys):
        gathered, scatter = jax.vjp(lambda params: jax.tree.map(gather_param, params, specs), trained)
        constant = {i: split_microbatches(a, parts) if i in by_row else a for i, a in constant.items()}
        tokens = {name: _stage_tokens(split_microbatches(a, parts)) for name, a in tokens.items()}

        def run(params, shared, x, microbatch):
            context_arrays = shared | {i: a[microbatch] if i in by_row else a for i, a in constant.items()}
            context = jax.tree.unflatten(structure, [context_arrays[i] for i in range(len(context_arrays))])
            return stage(params, x, layers, context, microbatch_keys(keys, microbatch))

        def compute_loss(params, stream, microbatch):
            return ending.run(params, stream[None], {name: a[microbatch][None] for name, a in tokens.items()})

        count = len(next(iter(tokens.values())))
        gradients, loss = _Ticks(run, compute_loss, gathered["blocks"], gathered["ending"], shared, x, count).run_all()
        (d_trained,) = scatter({"blocks": gradients.blocks, "ending": gradients.ending})
        d_trained = jax.tree.map(_sum_gradient, d_trained, shards)
        return jax.lax.psum(loss, BATCH_AXES), (d_trained, gradients.x, jax.lax.psum(gradients.shared, BATCH_AXES))

    loss_and_gradients = jax.shard_map(
        on_stage,
        in_specs=(shards, rows, P(), {i: rows if i in by_row else P() for i in constant}, P(PIPELINE_AXIS), rows, P()),
        out_specs=(P(), (shards, rows, P())),
        axis_names=set(BATCH_AXES),
        check_vma=False,  # for the same reason as in `run_pipeline`
    )
    return _loss(loss_and_gradients, trained, x, shared, constant, layers, ending.tokens, keys)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(loss_and_gradients: Callable[..., tuple[Loss, PyTree]], *arguments: PyTree) -> Loss:
    return loss_and_gradients(*arguments)[0]


def _loss_forward(loss_and_gradients, *arguments):
    return loss_and_gradients(*arguments)


def _loss_backward(_, gradients, cotangents):
    # The forward has already computed the gradients of the objective, so they only need scaling. The metric sums have
    # no gradient.
    scaled = jax.tree.map(lambda g: (g.astype(jnp.float32) * cotangents[0]).astype(g.dtype), gradients)
    return *scaled, None, None, None, None


_loss.defvjp(_loss_forward, _loss_backward)


def _sum_gradient(gradient: jax.Array, spec: P) -> jax.Array:
    """Sums a gradient over the devices that hold the same shard of a parameter.

    Args:
      spec: the spec of the parameter's shards.
    """
    return jax.lax.psum(gradient, [axis for axis in BATCH_AXES if axis not in jax.tree.leaves(tuple(spec))])


def _stage_tokens(x: jax.Array) -> jax.Array:
    """Returns this stage's share of each microbatch's tokens, [M, b, T] -> [M, n].

    Each stage gets 1/P of the tokens. Zeros at the end pad the tokens to a multiple of P.
    """
    x, stages = x.reshape(len(x), -1), axis_size(PIPELINE_AXIS)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % stages)))
    return x.reshape(len(x), stages, -1)[:, jax.lax.axis_index(PIPELINE_AXIS)]


@dataclasses.dataclass(frozen=True)
class _Ticks:
    """The computation of all microbatches on one stage.

    Each method computes one phase of a tick. All stages execute the same methods at the same time.
    """

    # Applies the layers of the stage: (blocks, shared, x, index of the microbatch) -> hidden states
    run: Callable[[PyTree, dict[int, jax.Array], jax.Array, jax.Array], jax.Array]
    # Computes the loss of this stage's tokens of a microbatch: (ending, hidden states [n, D], microbatch index) -> loss
    compute_loss: Callable[[PyTree, jax.Array, jax.Array], Loss]
    blocks: PyTree
    ending: PyTree
    shared: dict[int, jax.Array]
    x: jax.Array  # [n, T, D]
    parts: int  # M

    def run_all(self) -> tuple[_Gradients, Loss]:
        """Runs all ticks, and returns this stage's gradients and loss, each summed over the microbatches."""
        last_stage, ticks = self._stages - 1, self.parts + self._stages - 1

        def forward_and_backward(state, tick):
            y, state = self._forward(state, tick)
            d_y, state = self._loss(state, y, tick - last_stage)
            return self._backward(state, d_y, tick), None

        state = self._start()
        state, _ = jax.lax.scan(lambda s, tick: (self._forward(s, tick)[1], None), state, jnp.arange(last_stage))
        state, _ = jax.lax.scan(forward_and_backward, state, jnp.arange(last_stage, ticks))
        backward = functools.partial(self._backward, d_y=jnp.zeros_like(state.forward))
        state, _ = jax.lax.scan(
            lambda s, tick: (backward(s, tick=tick), None), state, jnp.arange(ticks, ticks + last_stage)
        )
        return state.gradients, state.loss

    @property
    def _stages(self) -> int:
        return axis_size(PIPELINE_AXIS)

    @property
    def _stage_index(self) -> jax.Array:
        return jax.lax.axis_index(PIPELINE_AXIS)

    @property
    def _rows(self) -> int:
        """Returns the number of rows per microbatch."""
        return len(self.x) * self._stages // self.parts

    def _start(self) -> _State:
        """Returns the state before the first tick, in which all arrays are 0."""
        zeros = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, a.dtype))
        microbatch = jnp.zeros((self._rows, *self.x.shape[1:]), self.x.dtype)
        stage_tokens = jax.ShapeDtypeStruct(
            (-(-microbatch[..., 0].size // self._stages), microbatch.shape[-1]), microbatch.dtype
        )
        loss = jax.eval_shape(self.compute_loss, self.ending, stage_tokens, 0)
        inputs = jnp.zeros((2 * self._stages - 1, *microbatch.shape), microbatch.dtype)
        gradients = _Gradients(*zeros((self.blocks, self.ending, self.shared, self.x)))
        return _State(microbatch, microbatch, inputs, gradients, zeros(loss))

    def _forward(self, state: _State, tick: jax.Array) -> tuple[jax.Array, _State]:
        """Computes microbatch `tick` - s on this stage (number s), and sends the output to the next stage.

        Returns the output and the new state. In the bubble, the stage computes an arbitrary microbatch, because no
        stage reads the result.
        """
        microbatch = tick - self._stage_index
        x = jnp.where(self._stage_index == 0, self._embeddings(tick), state.forward)
        y = self.run(self.blocks, self.shared, x, self._clip_index(microbatch))
        return y, state._replace(
            forward=self._send(y, 1), inputs=state.inputs.at[microbatch % len(state.inputs)].set(x)
        )

    def _loss(self, state: _State, y: jax.Array, microbatch: jax.Array) -> tuple[jax.Array, _State]:
        """Computes the loss of one microbatch, and its gradient with respect to the last stage's output.

        Returns the gradient, and the state with the loss added. All stages compute the loss together, each for 1/P of
        the tokens.

        Args:
          y: this stage's output in this tick; only the output of the last stage is used.
          microbatch: index of the microbatch.
        """
        # [b, T, D] -> [b T, D]
        tokens = jnp.where(self._stage_index == self._stages - 1, y, 0).reshape(-1, y.shape[-1])
        count = len(tokens)
        tokens = jnp.pad(tokens, ((0, -count % self._stages), (0, 0)))
        tokens = between_stages(jax.lax.psum_scatter, tokens, tiled=True)
        objective, vjp, sums = jax.vjp(
            lambda *args: self.compute_loss(*args, microbatch), self.ending, tokens, has_aux=True
        )
        d_ending, d_tokens = vjp(jnp.ones_like(objective))
        d_y = jax.lax.all_gather(d_tokens, PIPELINE_AXIS, tiled=True)[:count].reshape(y.shape)
        gradients = state.gradients._replace(ending=_add(state.gradients.ending, d_ending))
        return d_y, state._replace(gradients=gradients, loss=_add(state.loss, (objective, sums)))

    def _backward(self, state: _State, d_y: jax.Array, tick: jax.Array) -> _State:
        """Adds the gradients of microbatch `tick` - 2 (P - 1) + s to the state, on stage s of P stages.

        In the bubble, the incoming gradient is zero, and so are the resulting gradients.

        Args:
          d_y: the gradient of the last stage's output; the other stages use the gradient that they received.
        """
        last_stage = self._stages - 1
        microbatch = tick - 2 * last_stage + self._stage_index
        d_y = jnp.where(self._stage_index == last_stage, d_y, state.backward)
        d_y = jnp.where((microbatch >= 0) & (microbatch < self.parts), d_y, 0)
        valid_microbatch = self._clip_index(microbatch)
        _, vjp = jax.vjp(
            lambda *args: self.run(*args, valid_microbatch),
            self.blocks,
            self.shared,
            state.inputs[microbatch % len(state.inputs)],
        )
        d_blocks, d_shared, d_x = vjp(d_y)
        old = state.gradients
        gradients = _Gradients(
            _add(old.blocks, d_blocks),
            old.ending,
            _add(old.shared, d_shared),
            old.x.at[self._row_indices(tick - 2 * last_stage)].add(self._broadcast_first(d_x), mode="drop"),
        )
        return state._replace(backward=self._send(d_x, -1), gradients=gradients)

    def _clip_index(self, microbatch: jax.Array) -> jax.Array:
        return jnp.clip(microbatch, 0, self.parts - 1)

    def _send(self, x: jax.Array, step: int) -> jax.Array:
        """Sends x from this stage s to stage s + `step`, and returns the array that this stage receives.

        A stage that receives no array gets zeros.
        """
        pairs = [(i, i + step) for i in range(self._stages) if 0 <= i + step < self._stages]
        return jax.lax.ppermute(x, PIPELINE_AXIS, pairs)

    def _row_indices(self, microbatch: jax.Array) -> jax.Array:
        """Returns the indices [b] of a microbatch's rows within the n rows of this device.

        Rows that other devices hold get the index n, which is out of range.
        """
        indices = microbatch * self._rows + jnp.arange(self._rows) - self._stage_index * len(self.x)
        return jnp.where((indices >= 0) & (indices < len(self.x)), indices, len(self.x))

    def _embeddings(self, microbatch: jax.Array) -> jax.Array:
        """Broadcasts a microbatch's embeddings [b, T, D] to all stages, from the devices that hold its rows."""
        local = self.x.at[self._row_indices(microbatch)].get(mode="fill", fill_value=0)
        return between_stages(jax.lax.psum, local)

    def _broadcast_first(self, x: jax.Array) -> jax.Array:
        """Broadcasts the first stage's array x to all stages."""
        return between_stages(jax.lax.psum, jnp.where(self._stage_index == 0, x, 0))


def _add(total: PyTree, increment: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, total, increment)
