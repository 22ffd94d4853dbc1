"""Implements SOAP, which runs Adam in the eigenbases of Shampoo's factors."""

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
    """Adam on gradients that are rotated into the eigenbases of their second moments.

    Source: Vyas et al. 2024, arXiv 2409.11321, algorithm 3. For each matrix, with I inputs, O outputs and gradient G,

        L = b3 L + (1 - b3) G Gᵀ [I, I], R = b3 R + (1 - b3) Gᵀ G [O, O]; P and Q are the eigenvectors of L and R
        w -= rate(step) · (P Adam(Pᵀ G Q) Qᵀ + weight_decay · w)

    One power iteration and a QR decomposition update the eigenvectors every `interval` updates. As in the released
    code, the first update only initializes L and R, and its Adam term is zero. A side longer than `max_side` is not
    rotated. AdamW trains biases and norms. The optimizer state of a square matrix is six times as large as the matrix;
    with Adam, it is twice as large.

    NOTE The rank of the first gradient is below the longer side of a matrix. As in the released code, rounding errors
    determine the basis of the remaining directions, so the first steps differ between meshes. On the same mesh, a run
    is reproducible bit for bit. A run that resumes on a different mesh loads its bases from the checkpoint.
    NOTE The heads of a projection form one matrix [D, H · K], like the weight of a linear layer in the released code.
    Unlike in the released code, the first update applies weight decay.
    """

    learning_rate: float = 3e-3  # peak of the schedule
    b1: float = 0.95  # decay rate of the first moment
    b2: float = 0.95  # decay rate of the second moment, in rotated coordinates
    b3: float = 0.95  # decay rate of L and R
    epsilon: float = 1e-8  # added to the square root of the second moment
    interval: int = 10  # number of updates between changes of the eigenvectors
    max_side: int = 10_000  # longer sides of a matrix are not rotated
    weight_decay: float = 0.01  # decoupled, times the learning rate; biases and norms do not decay
    clip_norm: Optional[float] = 1.0  # maximum global norm of the gradient; None: no clipping

    def directions(self, params_shape):
        matrices = self._matrices(params_shape)
        labels = jax.tree.map(
            lambda x: "soap" if isinstance(x, _Matrix) else "adam",
            matrices,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
        transformations = {"soap": self._rotated(matrices), "adam": scale_by_adam(self.b1, self.b2, self.epsilon)}
        yield optax.partition(transformations, labels)

    def problems(self, experiment):
        yield from super().problems(experiment)
        for name in ("interval", "max_side"):
            if getattr(self, name) < 1:
                yield f"config.optimizer.{name} is {getattr(self, name)}, it must be at least 1"

    def _matrices(self, params_shape: PyTree) -> PyTree:
        """Returns a `_Matrix` for each parameter with a rotated side, and a MaskedNode for the other parameters."""

        def matrix_of(name: str, x: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> Union[_Matrix, optax.MaskedNode]:
            stacked = sum(axis in STACKED for axis in axes)
            outputs = first_output(axes)
            if not name.endswith(("kernel", "embedding")) or outputs <= stacked:
                return optax.MaskedNode()
            sides = math.prod(x.shape[stacked:outputs]), math.prod(x.shape[outputs:])
            rotated = tuple(i for i, side in enumerate(sides) if side <= self.max_side)
            names = axes[stacked], axes[outputs]
            return (
                _Matrix((*x.shape[:stacked], *sides), axes[:stacked], names, rotated) if rotated else optax.MaskedNode()
            )

        leaves = map(jax.tree.leaves, (tree_of_names(params_shape), params_shape))
        rows = map(matrix_of, *leaves, axes_of_leaves(params_shape))
        return jax.tree.unflatten(jax.tree.structure(params_shape), list(rows))

    def _rotated(self, matrices: PyTree) -> optax.GradientTransformation:
        """Returns SOAP's transformation of the gradients of the parameters that have a `_Matrix`."""

        def init(params):
            if not jax.tree.leaves(params):  # Optax inspects the structure with a tree without arrays
                return _State(jnp.zeros((), jnp.int32), *(params,) * 4)
            zeros, factors = optax.tree.zeros_like(params), jax.tree.map(lambda m: m.factors(), matrices)
            return _State(jnp.zeros((), jnp.int32), zeros, zeros, factors, factors)

        def update(updates, state, params=None):
            tree = jax.tree.structure(updates)
            arrays = [tree.flatten_up_to(x) for x in (updates, *state[1:])]
            results = [
                self._update_array(m, state.count, *x) for m, *x in zip(jax.tree.leaves(matrices), *arrays, strict=True)
            ]
            updates, *new_state = map(tree.unflatten, zip(*results, strict=True))
            return updates, _State(state.count + 1, *new_state)

        return optax.GradientTransformation(init, update)

    def _update_array(self, matrix: "_Matrix", count, gradient, mean, square, factors, bases):
        """Returns the update of one parameter and its new state: (update, mean, square, factors, bases)."""
        shape, started = gradient.shape, count > 0
        gradient, mean, square = (x.reshape(matrix.shape) for x in (gradient, mean, square))
        mean = jnp.where(started, _ema(mean, gradient, self.b1), mean)
        square = jnp.where(started, _ema(square, jnp.square(matrix.rotate(gradient, bases)), self.b2), square)
        direction = matrix.rotate(matrix.rotate(mean, bases) / (jnp.sqrt(square) + self.epsilon), bases, back=True)
        correction = jnp.sqrt(1 - self.b2**count) / jnp.where(started, 1 - self.b1**count, 1.0)  # 0 at the first update

        factors = [
            x.replace(array=_ema(x.array, outer, self.b3))
            for x, outer in zip(factors, matrix.outer(gradient), strict=True)
        ]
        change = jnp.where(started, 1 + (count % self.interval == 0), 0)
        replicated = [[constrain(x.array, P()) for x in arrays] for arrays in (bases, factors)]  # for decompositions
        new_bases = jax.lax.switch(change, [_eigenvectors, lambda bases, _: bases, _power_iteration], *replicated)
        bases = [x.replace(array=vectors) for x, vectors in zip(bases, new_bases, strict=True)]
        return (correction * direction).reshape(shape), mean.reshape(shape), square.reshape(shape), factors, bases


class _State(NamedTuple):
    count: jax.Array  # [] int32, number of updates so far
    mean: PyTree  # first moment of the gradients
    square: PyTree  # second moment of the rotated gradients
    factors: PyTree  # L and R of each parameter, a list of `Placed`
    bases: PyTree  # P and Q of each parameter, a list of `Placed`


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """Describes a parameter as stacked matrices [stacked…, inputs, outputs]."""

    shape: tuple[int, ...]  # the shape of the stacked matrices
    stacked: tuple[str, ...]  # names of the axes that stack matrices
    names: tuple[str, str]  # logical names of the first input axis and of the first output axis
    rotated: tuple[int, ...]  # the sides with eigenvectors: 0 inputs, 1 outputs

    def factors(self) -> list[Placed]:
        """Returns the initial factors L and R: zeros [stacked…, side, side] for each rotated side, with axis names."""
        sides = [(self.shape[i - 2], self.names[i]) for i in self.rotated]
        return [Placed(jnp.zeros((*self.shape[:-2], n, n)), (*self.stacked, name, None)) for n, name in sides]

    def outer(self, x: jax.Array) -> list[jax.Array]:
        """Returns the outer products for the rotated sides: x xᵀ for inputs, xᵀ x for outputs."""
        return [_product(("...IO,...JO->...IJ", "...IO,...IP->...OP")[i], x, x) for i in self.rotated]

    def rotate(self, x: jax.Array, bases: list[Placed], back: bool = False) -> jax.Array:
        """Returns Pᵀ x Q; with `back`, the inverse rotation P x Qᵀ. Sides that are not rotated have no P or Q."""
        for i, basis in zip(self.rotated, bases, strict=True):
            matrix = basis.array.mT if back else basis.array
            x = _product(("...IO,...IJ->...JO", "...IO,...OP->...IP")[i], x, matrix)
        return x


def _eigenvectors(bases: list[jax.Array], factors: list[jax.Array]) -> list[jax.Array]:
    """Returns the eigenvectors of the factors, [stacked…, side, side]; `bases` is unused (for `jax.lax.switch`)."""
    del bases
    return [_each_matrix(lambda factor: jnp.linalg.eigh(factor)[1], factor) for factor in factors]


def _power_iteration(bases: list[jax.Array], factors: list[jax.Array]) -> list[jax.Array]:
    """Returns the bases after one power iteration, orthogonalized in the order of decreasing eigenvalue estimates.

    NOTE The released code also sorts the vectors and the second moments. Here, both keep their order.
    """

    def iterate(basis: jax.Array, factor: jax.Array) -> jax.Array:
        product = _product("IJ,JK->IK", factor, basis)
        order = jnp.argsort(-jnp.sum(basis * product, axis=0))
        return jnp.linalg.qr(product[:, order])[0][:, jnp.argsort(order)]

    return [_each_matrix(iterate, *pair) for pair in zip(bases, factors, strict=True)]


def _each_matrix(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Applies a function to each matrix of arrays [stacked…, side, side], one matrix after the other.

    With more simulated CPU devices than cores, decomposing several matrices at once may deadlock, as in a test on eight
    devices: LAPACK uses the threads on which the devices wait for each other.
    """
    return function(*arrays) if arrays[0].ndim == 2 else jax.lax.map(lambda x: _each_matrix(function, *x), arrays)


def _ema(mean: jax.Array, new: jax.Array, decay: float) -> jax.Array:
    return decay * mean + (1 - decay) * new


def _product(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the einsum of two arrays in full float32 precision, also on a TPU."""
    return jnp.einsum(axes, x, y, precision="highest")
