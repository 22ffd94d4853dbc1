"""One forward, one backward: a pipeline whose parts go back as soon as the last stage has their loss (PipeDream-flush;
Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

Stages and parts are those of `layers/pipeline.py`, and so is the bubble: M + P - 1 forwards, and as many backwards. But
at tick t stage s computes part t - s, and then the gradient of part t - 2 (P - 1) + s, of what the stage behind it has
sent at the tick before. So the last stage turns a part round in the tick in which it comes, and the first one keeps
2 P - 1 parts, whatever M is: all stages tick together, where those of the paper, which wait for their neighbours alone,
keep P. The first P - 1 ticks have no backward, the last P - 1 no forward.

What is kept of a part is the stream that came in: its layers are computed again where its gradient is made, with what
`train.remat` keeps of them, of one part at a time.

The tokens of the part that leaves the last stage are divided among all stages for the final norm, the head and the
loss, so that no stage waits for another's product with the vocabulary.

The gradients are there when the loss is: the rule of differentiation only scales them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.layers.block import Context, Layer
from pretrainax.layers.pipeline import Keys, Stage, between_stages, cut, gathered, of_part, own_spec
from pretrainax.layers.sums import Sums
from pretrainax.sharding.axes import BATCH_AXES, PIPELINE_AXIS
from pretrainax.sharding.mesh import axis_size
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import param_specs

Loss: TypeAlias = tuple[jax.Array, Sums]  # what is minimised, and what is told; of some tokens, to be added up


class Ending(NamedTuple):
    """Makes the loss of the stream that leaves the last block."""

    run: Callable[[PyTree, jax.Array, dict[str, jax.Array]], Loss]  # of (params, stream [1, n, D], tokens [1, n])
    params: PyTree  # that it reads
    tokens: dict[str, jax.Array]  # [B, T] each: what it has to know of each token


class _Gradients(NamedTuple):
    """Holds gradients of one stage, added up over parts."""

    blocks: PyTree
    ending: PyTree
    shared: dict[int, jax.Array]  # arrays that all layers read
    x: jax.Array  # [n, T, D], of the embeddings of this device's rows


class _State(NamedTuple):
    """Holds what a stage hands to its next tick."""

    forward: jax.Array  # [b, T, D], from the stage before
    backward: jax.Array  # [b, T, D], the gradient from the stage behind
    kept: jax.Array  # [2 P - 1, b, T, D]: what came in, until its gradient is made
    gradients: _Gradients
    loss: Loss


def one_forward_one_backward(
    stage: Stage, ending: Ending, params: PyTree, x: jax.Array, layers: Layer, context: Context, keys: Keys, parts: int
) -> Loss:
    """Returns the loss of all rows, with which its gradients are computed, under the mesh of `jax.set_mesh`.

    What of the context is of rows follows from the batch alone and has no gradient; a bias that rows share has one.
    The other arguments are those of `layers.pipeline.pipelined`.
    """
    trained = {"blocks": params, "ending": ending.params}
    specs = param_specs(trained)
    own, rows = jax.tree.map(own_spec, specs), P(BATCH_AXES)
    leaves, structure = jax.tree.flatten(context)
    arrays = dict(enumerate(leaves))
    by_row = {i for i, a in arrays.items() if a.ndim > 1 and a.shape[0] == len(x)}
    shared = {i: a for i, a in arrays.items() if i not in by_row and jnp.issubdtype(a.dtype, jnp.floating)}
    fixed = {i: a for i, a in arrays.items() if i not in shared}

    def on_stage(trained, x, shared, fixed, layers, tokens, keys):
        whole, scattered = jax.vjp(lambda params: jax.tree.map(gathered, params, specs), trained)
        fixed = {i: cut(a, parts) if i in by_row else a for i, a in fixed.items()}
        tokens = {name: _of_this_stage(cut(a, parts)) for name, a in tokens.items()}

        def run(params, shared, x, number):
            found = shared | {i: a[number] if i in by_row else a for i, a in fixed.items()}
            context = jax.tree.unflatten(structure, [found[i] for i in range(len(found))])
            return stage(params, x, layers, context, of_part(keys, number))

        def end(params, stream, number):
            return ending.run(params, stream[None], {name: a[number][None] for name, a in tokens.items()})

        count = len(next(iter(tokens.values())))
        gradients, loss = _Ticks(run, end, whole["blocks"], whole["ending"], shared, x, count).all()
        (of_trained,) = scattered({"blocks": gradients.blocks, "ending": gradients.ending})
        of_trained = jax.tree.map(_summed, of_trained, own)
        return jax.lax.psum(loss, BATCH_AXES), (of_trained, gradients.x, jax.lax.psum(gradients.shared, BATCH_AXES))

    both = jax.shard_map(
        on_stage,
        in_specs=(own, rows, P(), {i: rows if i in by_row else P() for i in fixed}, P(PIPELINE_AXIS), rows, P()),
        out_specs=(P(), (own, rows, P())),
        axis_names=set(BATCH_AXES),
        check_vma=False,  # as in `pipelined`
    )
    return _loss(both, trained, x, shared, fixed, layers, ending.tokens, keys)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(both: Callable[..., tuple[Loss, PyTree]], *arguments: PyTree) -> Loss:
    return both(*arguments)[0]


def _loss_forward(both, *arguments):
    return both(*arguments)


def _loss_backward(_, gradients, cotangents):
    # The gradients of the objective are at hand: what follows it only scales them. The sums beside it have none.
    scaled = jax.tree.map(lambda g: (g.astype(jnp.float32) * cotangents[0]).astype(g.dtype), gradients)
    return *scaled, None, None, None, None


_loss.defvjp(_loss_forward, _loss_backward)


def _summed(gradient: jax.Array, own: P) -> jax.Array:
    """Returns a gradient summed over the devices that have the same part of a parameter."""
    return jax.lax.psum(gradient, [axis for axis in BATCH_AXES if axis not in own])


def _of_this_stage(x: jax.Array) -> jax.Array:
    """Returns this stage's share of the tokens of each part, [M, b, T] -> [M, n]; the last is filled up with zeros."""
    x, stages = x.reshape(len(x), -1), axis_size(PIPELINE_AXIS)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % stages)))
    return x.reshape(len(x), stages, -1)[:, jax.lax.axis_index(PIPELINE_AXIS)]


@dataclasses.dataclass(frozen=True)
class _Ticks:
    """Computes all parts on one stage: each method is a piece of a tick, of which all stages do the same."""

    run: Callable[[PyTree, dict[int, jax.Array], jax.Array, jax.Array], jax.Array]  # the stage's layers, of a part
    end: Callable[[PyTree, jax.Array, jax.Array], Loss]  # of this stage's share of the tokens of a part, [n, D]
    blocks: PyTree
    ending: PyTree
    shared: dict[int, jax.Array]
    x: jax.Array  # [n, T, D]
    parts: int  # M

    def all(self) -> tuple[_Gradients, Loss]:
        """Returns the sums over all ticks."""
        behind, turns = self._stages - 1, self.parts + self._stages - 1

        def turn_round(state, turn):
            y, state = self._forward(state, turn)
            d_y, state = self._loss(state, y, turn - behind)
            return self._backward(state, d_y, turn), None

        state = self._start()
        state, _ = jax.lax.scan(lambda s, turn: (self._forward(s, turn)[1], None), state, jnp.arange(behind))
        state, _ = jax.lax.scan(turn_round, state, jnp.arange(behind, turns))
        back = functools.partial(self._backward, d_y=jnp.zeros_like(state.forward))
        state, _ = jax.lax.scan(lambda s, turn: (back(s, turn=turn), None), state, jnp.arange(turns, turns + behind))
        return state.gradients, state.loss

    @property
    def _stages(self) -> int:
        return axis_size(PIPELINE_AXIS)

    @property
    def _place(self) -> jax.Array:
        return jax.lax.axis_index(PIPELINE_AXIS)

    @property
    def _rows(self) -> int:
        """Counts the rows of a part."""
        return len(self.x) * self._stages // self.parts

    def _start(self) -> _State:
        zeros = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, a.dtype))
        part = jnp.zeros((self._rows, *self.x.shape[1:]), self.x.dtype)
        tokens = jax.ShapeDtypeStruct((-(-part[..., 0].size // self._stages), part.shape[-1]), part.dtype)
        loss = jax.eval_shape(self.end, self.ending, tokens, 0)
        kept = jnp.zeros((2 * self._stages - 1, *part.shape), part.dtype)
        gradients = _Gradients(*zeros((self.blocks, self.ending, self.shared, self.x)))
        return _State(part, part, kept, gradients, zeros(loss))

    def _forward(self, state: _State, turn: jax.Array) -> tuple[jax.Array, _State]:
        """Computes part `turn` - s. In the bubble it is any part, as nobody reads the result."""
        number = turn - self._place
        x = jnp.where(self._place == 0, self._entering(turn), state.forward)
        y = self.run(self.blocks, self.shared, x, self._real(number))
        return y, state._replace(forward=self._sent(y, 1), kept=state.kept.at[number % len(state.kept)].set(x))

    def _loss(self, state: _State, y: jax.Array, number: jax.Array) -> tuple[jax.Array, _State]:
        """Returns the gradient for what the last stage has made of a part, on which all stages work: each on its share
        of the tokens."""
        tokens = jnp.where(self._place == self._stages - 1, y, 0).reshape(-1, y.shape[-1])  # [b, T, D] -> [b T, D]
        count = len(tokens)
        tokens = jnp.pad(tokens, ((0, -count % self._stages), (0, 0)))
        tokens = between_stages(jax.lax.psum_scatter, tokens, tiled=True)
        objective, pull, said = jax.vjp(lambda *of: self.end(*of, number), self.ending, tokens, has_aux=True)
        of_ending, d_tokens = pull(jnp.ones_like(objective))
        d_y = jax.lax.all_gather(d_tokens, PIPELINE_AXIS, tiled=True)[:count].reshape(y.shape)
        gradients = state.gradients._replace(ending=_added(state.gradients.ending, of_ending))
        return d_y, state._replace(gradients=gradients, loss=_added(state.loss, (objective, said)))

    def _backward(self, state: _State, d_y: jax.Array, turn: jax.Array) -> _State:
        """Adds the gradients of part `turn` - 2 (P - 1) + s; d_y: that for the last stage's. In the bubble zeros go
        back, and make zeros."""
        last = self._stages - 1
        number = turn - 2 * last + self._place
        d_y = jnp.where(self._place == last, d_y, state.backward)
        d_y = jnp.where((number >= 0) & (number < self.parts), d_y, 0)
        real = self._real(number)
        _, pull = jax.vjp(
            lambda *of: self.run(*of, real), self.blocks, self.shared, state.kept[number % len(state.kept)]
        )
        of_blocks, of_shared, d_x = pull(d_y)
        old = state.gradients
        gradients = _Gradients(
            _added(old.blocks, of_blocks),
            old.ending,
            _added(old.shared, of_shared),
            old.x.at[self._places(turn - 2 * last)].add(self._from_first(d_x), mode="drop"),
        )
        return state._replace(backward=self._sent(d_x, -1), gradients=gradients)

    def _real(self, number: jax.Array) -> jax.Array:
        return jnp.clip(number, 0, self.parts - 1)

    def _sent(self, x: jax.Array, step: int) -> jax.Array:
        """Returns what the neighbour has sent; the stage at the end, which has none, gets zeros."""
        pairs = [(i, i + step) for i in range(self._stages) if 0 <= i + step < self._stages]
        return jax.lax.ppermute(x, PIPELINE_AXIS, pairs)

    def _places(self, number: jax.Array) -> jax.Array:
        """Returns where in this device's rows those of a part are, [b]; n: they are another's."""
        places = number * self._rows + jnp.arange(self._rows) - self._place * len(self.x)
        return jnp.where((places >= 0) & (places < len(self.x)), places, len(self.x))

    def _entering(self, number: jax.Array) -> jax.Array:
        """Returns the embeddings of a part, [b, T, D], from the devices whose rows they are."""
        mine = self.x.at[self._places(number)].get(mode="fill", fill_value=0)
        return between_stages(jax.lax.psum, mine)

    def _from_first(self, x: jax.Array) -> jax.Array:
        """Returns what the first stage has, on all of them."""
        return between_stages(jax.lax.psum, jnp.where(self._place == 0, x, 0))


def _added(total: PyTree, more: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, total, more)
