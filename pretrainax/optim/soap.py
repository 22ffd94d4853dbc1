"""SOAP: Adam in the coordinates in which Shampoo's factors of a matrix are diagonal."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, Optional, Union

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from pretrainax.optim.matrices import STACKED, first_output, tree_of_names
from pretrainax.optim.optimizers import Chain, scale_by_adam
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.optimizer_state import Placed
from pretrainax.sharding.param_paths import PyTree
from pretrainax.sharding.rules import axes_of_leaves


@dataclasses.dataclass
class SOAP(Chain):
    """Adam on gradients turned into the eigenbases of their second moments (Vyas et al. 2024, arXiv 2409.11321,
    algorithm 3). For each matrix, with inputs I and outputs O,

        L = b3 L + (1 - b3) G Gᵀ [I, I], R = b3 R + (1 - b3) Gᵀ G [O, O]; P and Q are their eigenvectors
        w -= rate(step) · (P Adam(Pᵀ G Q) Qᵀ + weight_decay · w)

    The eigenvectors are made anew every `interval` updates, by one power iteration and a QR decomposition. The first
    update only starts L and R, and is zero, as in the released code. A side longer than `longest` is not turned; AdamW
    trains biases and norms. The state of a square matrix is six times as large as the matrix, Adam's twice.

    NOTE The first gradient has fewer directions than a matrix's longer side. Which basis the others get, rounding
    decides, here as in the released code: on another mesh a run begins with other steps. On its own it repeats bit for
    bit, and a run that is resumed on another mesh takes its bases along.
    NOTE Of heads side by side one matrix is made, as of a layer in released code: [D, H · K]. The first, zero, update
    decays the weights here.
    """

    learning_rate: float = 3e-3  # peak of the schedule
    b1: float = 0.95  # memory of the mean of gradients
    b2: float = 0.95  # memory of the mean of their squares, in turned coordinates
    b3: float = 0.95  # memory of L and R
    epsilon: float = 1e-8  # added to the root of the squares
    interval: int = 10  # updates from one change of the eigenvectors to the next
    longest: int = 10_000  # side of a matrix that has eigenvectors
    weight_decay: float = 0.01  # pull of weights to zero, times the rate; biases and norms have none
    clip_norm: Optional[float] = 1.0  # largest norm of the whole gradient; None: any

    def directions(self, params_shape):
        matrices = self._matrices(params_shape)
        labels = jax.tree.map(
            lambda x: "soap" if isinstance(x, _Matrix) else "adam",
            matrices,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
        by = {"soap": self._turned(matrices), "adam": scale_by_adam(self.b1, self.b2, self.epsilon)}
        yield optax.partition(by, labels)

    def problems(self, experiment):
        yield from super().problems(experiment)
        for name in ("interval", "longest"):
            if getattr(self, name) < 1:
                yield f"config.optimizer.{name} is {getattr(self, name)}, it must be at least 1"

    def _matrices(self, params_shape: PyTree) -> PyTree:
        """Returns a `_Matrix` for each array of matrices that have a side to turn, and a MaskedNode for each other."""

        def of(name: str, x: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> Union[_Matrix, optax.MaskedNode]:
            stacked = sum(axis in STACKED for axis in axes)
            outputs = first_output(axes)
            if not name.endswith(("kernel", "embedding")) or outputs <= stacked:
                return optax.MaskedNode()
            sides = math.prod(x.shape[stacked:outputs]), math.prod(x.shape[outputs:])
            turned = tuple(i for i, side in enumerate(sides) if side <= self.longest)
            names = axes[stacked], axes[outputs]
            return (
                _Matrix((*x.shape[:stacked], *sides), axes[:stacked], names, turned) if turned else optax.MaskedNode()
            )

        leaves = map(jax.tree.leaves, (tree_of_names(params_shape), params_shape))
        found = map(of, *leaves, axes_of_leaves(params_shape))
        return jax.tree.unflatten(jax.tree.structure(params_shape), list(found))

    def _turned(self, matrices: PyTree) -> optax.GradientTransformation:
        """Returns the transformation of the arrays that have a `_Matrix`."""

        def init(params):
            if not jax.tree.leaves(params):  # Optax asks what a state is made of with a tree without arrays
                return _State(jnp.zeros((), jnp.int32), *(params,) * 4)
            zeros, factors = optax.tree.zeros_like(params), jax.tree.map(lambda m: m.factors(), matrices)
            return _State(jnp.zeros((), jnp.int32), zeros, zeros, factors, factors)

        def update(updates, state, params=None):
            tree = jax.tree.structure(updates)
            arrays = [tree.flatten_up_to(x) for x in (updates, *state[1:])]
            made = [self._one(m, state.count, *x) for m, *x in zip(jax.tree.leaves(matrices), *arrays, strict=True)]
            updates, *kept = map(tree.unflatten, zip(*made, strict=True))
            return updates, _State(state.count + 1, *kept)

        return optax.GradientTransformation(init, update)

    def _one(self, matrix: "_Matrix", count, gradient, mean, square, factors, bases):
        """Returns the update of one array, and its part of the state."""
        shape, begun = gradient.shape, count > 0
        gradient, mean, square = (x.reshape(matrix.shape) for x in (gradient, mean, square))
        mean = jnp.where(begun, _moved(mean, gradient, self.b1), mean)
        square = jnp.where(begun, _moved(square, jnp.square(matrix.turn(gradient, bases)), self.b2), square)
        made = matrix.turn(matrix.turn(mean, bases) / (jnp.sqrt(square) + self.epsilon), bases, back=True)
        size = jnp.sqrt(1 - self.b2**count) / jnp.where(begun, 1 - self.b1**count, 1.0)  # 0 at the first update

        factors = [
            x.replace(array=_moved(x.array, outer, self.b3))
            for x, outer in zip(factors, matrix.outer(gradient), strict=True)
        ]
        change = jnp.where(begun, 1 + (count % self.interval == 0), 0)
        whole = [[constrain(x.array, P()) for x in arrays] for arrays in (bases, factors)]  # as a decomposition needs
        found = jax.lax.switch(change, [_eigenvectors, lambda bases, _: bases, _turned_on], *whole)
        bases = [x.replace(array=vectors) for x, vectors in zip(bases, found, strict=True)]
        return (size * made).reshape(shape), mean.reshape(shape), square.reshape(shape), factors, bases


class _State(NamedTuple):
    count: jax.Array  # [] int32, updates so far
    mean: PyTree  # of gradients
    square: PyTree  # of turned gradients
    factors: PyTree  # L and R of each array, a list of `Placed`
    bases: PyTree  # P and Q of each array, a list of `Placed`


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """Says how an array is read as matrices: [stacked, inputs, outputs]."""

    shape: tuple[int, ...]
    stacked: tuple[str, ...]  # axes that matrices lie along
    names: tuple[str, str]  # of the axis of inputs and of outputs, or the first of them
    turned: tuple[int, ...]  # the sides that have eigenvectors: 0 inputs, 1 outputs

    def factors(self) -> list[Placed]:
        """Returns zeros [stacked, side, side] for each side that is turned."""
        sides = [(self.shape[i - 2], self.names[i]) for i in self.turned]
        return [Placed(jnp.zeros((*self.shape[:-2], n, n)), (*self.stacked, name, None)) for n, name in sides]

    def outer(self, x: jax.Array) -> list[jax.Array]:
        """Returns x xᵀ, or xᵀ x, of each side that is turned."""
        return [_product(("...IO,...JO->...IJ", "...IO,...IP->...OP")[i], x, x) for i in self.turned]

    def turn(self, x: jax.Array, bases: list[Placed], back: bool = False) -> jax.Array:
        """Returns Pᵀ x Q, or P x Qᵀ."""
        for i, basis in zip(self.turned, bases, strict=True):
            matrix = basis.array.mT if back else basis.array
            x = _product(("...IO,...IJ->...JO", "...IO,...OP->...IP")[i], x, matrix)
        return x


def _eigenvectors(bases: list[jax.Array], factors: list[jax.Array]) -> list[jax.Array]:
    """Returns eigenvectors [stacked, side, side] of the factors."""
    del bases
    return [_of_each(lambda factor: jnp.linalg.eigh(factor)[1], factor) for factor in factors]


def _turned_on(bases: list[jax.Array], factors: list[jax.Array]) -> list[jax.Array]:
    """Returns what one power iteration makes of the bases, made orthogonal in the order of their eigenvalues.

    NOTE The released code sorts the vectors, and the squares with them. Here each keeps its place, and so do they.
    """

    def one(basis: jax.Array, factor: jax.Array) -> jax.Array:
        product = _product("IJ,JK->IK", factor, basis)
        order = jnp.argsort(-jnp.sum(basis * product, axis=0))
        return jnp.linalg.qr(product[:, order])[0][:, jnp.argsort(order)]

    return [_of_each(one, *pair) for pair in zip(bases, factors, strict=True)]


def _of_each(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Returns the function of each matrix of arrays [stacked, side, side], one after the other.

    LAPACK would decompose several on the threads on which the devices of a CPU, where they are more than its cores,
    wait for each other: a test on eight of them stood still.
    """
    return function(*arrays) if arrays[0].ndim == 2 else jax.lax.map(lambda x: _of_each(function, *x), arrays)


def _moved(mean: jax.Array, new: jax.Array, memory: float) -> jax.Array:
    return memory * mean + (1 - memory) * new


def _product(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns an einsum in float32, on a TPU too."""
    return jnp.einsum(axes, x, y, precision="highest")
