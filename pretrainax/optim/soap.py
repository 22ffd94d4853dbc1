"""Implements SOAP, which runs Adam in the eigenbases of Shampoo's factors."""

import dataclasses
import math
from typing import NamedTuple, Optional, Union

import jax
import jax.numpy as jnp
import optax

from pretrainax.optim.matrices import STACKED, first_output, tree_of_names
from pretrainax.optim.optimizers import Chain, scale_by_adam
from pretrainax.optim.sharded_stacks import MatrixAxes, map_stacks
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
    code, the first update only initializes L and R, and its Adam term is zero. A dimension larger than `max_side` is
    not rotated. AdamW trains biases and norms. A square matrix's optimizer state is six times as large as the matrix
    (with Adam, twice as large).

    NOTE If a matrix is not square, the first gradient does not determine all eigenvectors of the larger factor, L or R.
    As in the released code, rounding errors determine the other eigenvectors, so the first steps differ between meshes.
    On a given mesh, runs are bitwise reproducible. A run that resumes on a different mesh loads P and Q from the
    checkpoint.
    NOTE The heads of a projection form one matrix [D, H · K], like the weight of a linear layer in the released code.
    Unlike in the released code, the first update applies weight decay.
    """

    learning_rate: float = 3e-3  # peak of the schedule
    b1: float = 0.95  # decay rate of the first moment
    b2: float = 0.95  # decay rate of the second moment, in rotated coordinates
    b3: float = 0.95  # decay rate of L and R
    epsilon: float = 1e-8  # added to the square root of the second moment
    interval: int = 10  # number of updates between changes of the eigenvectors
    max_side: int = 10_000  # larger dimensions of a matrix are not rotated
    weight_decay: float = 0.01  # decoupled, times the learning rate
    clip_norm: Optional[float] = 1.0  # maximum global norm of the gradient; None: no clipping

    def directions(self, params_shape):
        matrices = self._matrices(params_shape)
        labels = jax.tree.map(
            lambda x: "soap" if isinstance(x, _Matrix) else "adam",
            matrices,
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
        transformations = {
            "soap": self._transformation(matrices),
            "adam": scale_by_adam(self.b1, self.b2, self.epsilon),
        }
        yield optax.partition(transformations, labels)

    def problems(self, experiment):
        yield from super().problems(experiment)
        for name in ("interval", "max_side"):
            if getattr(self, name) < 1:
                yield f"config.optimizer.{name} is {getattr(self, name)}, it must be at least 1"

    def _matrices(self, params_shape: PyTree) -> PyTree:
        """Returns a `_Matrix` for each parameter with a rotated dimension, and a MaskedNode for all others."""

        def matrix_of(name: str, x: jax.ShapeDtypeStruct, axes: tuple[str, ...]) -> Union[_Matrix, optax.MaskedNode]:
            stacked = sum(axis in STACKED for axis in axes)
            outputs = first_output(axes)
            if not name.endswith(("kernel", "embedding")) or outputs <= stacked:
                return optax.MaskedNode()
            sizes = math.prod(x.shape[stacked:outputs]), math.prod(x.shape[outputs:])
            rotated = tuple(i for i, size in enumerate(sizes) if size <= self.max_side)
            names = axes[stacked], axes[outputs]
            return (
                _Matrix((*x.shape[:stacked], *sizes), axes[:stacked], names, rotated) if rotated else optax.MaskedNode()
            )

        leaves = map(jax.tree.leaves, (tree_of_names(params_shape), params_shape))
        matrices = map(matrix_of, *leaves, axes_of_leaves(params_shape))
        return jax.tree.unflatten(jax.tree.structure(params_shape), list(matrices))

    def _transformation(self, matrices: PyTree) -> optax.GradientTransformation:
        """Builds SOAP's transformation from gradients to update directions for the parameters that have a `_Matrix`."""

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
            updates, *moments, factors = map(tree.unflatten, zip(*results, strict=True))
            bases = self._updated_bases(state.count, state.bases, factors)
            return updates, _State(state.count + 1, *moments, factors, bases)

        return optax.GradientTransformation(init, update)

    def _update_array(self, matrix: "_Matrix", count, gradient, mean, square, factors, bases):
        """Computes one parameter's update and new moments; returns (update, mean, square, factors)."""
        shape, is_initialized = gradient.shape, count > 0
        gradient, mean, square = (x.reshape(matrix.shape) for x in (gradient, mean, square))
        mean = jnp.where(is_initialized, _ema(mean, gradient, self.b1), mean)
        square = jnp.where(is_initialized, _ema(square, jnp.square(matrix.rotate(gradient, bases)), self.b2), square)
        direction = matrix.rotate(matrix.rotate(mean, bases) / (jnp.sqrt(square) + self.epsilon), bases, inverse=True)
        correction = jnp.sqrt(1 - self.b2**count) / jnp.where(
            is_initialized, 1 - self.b1**count, 1.0
        )  # 0 at the first update

        factors = [
            x.replace(array=_ema(x.array, outer, self.b3))
            for x, outer in zip(factors, matrix.outer(gradient), strict=True)
        ]
        return (correction * direction).reshape(shape), mean.reshape(shape), square.reshape(shape), factors

    def _updated_bases(self, count: jax.Array, bases: PyTree, factors: PyTree) -> PyTree:
        """Computes the eigenvectors of all parameters; in most updates, they remain the same.

        Only a branch that decomposes matrices sends them: each device decomposes an equal number (`map_stacks`).
        """
        leaves, tree = jax.tree.flatten(bases, is_leaf=lambda x: isinstance(x, Placed))
        pairs = list(zip(*map(jax.tree.leaves, (bases, factors)), strict=True))
        axes = [MatrixAxes((len(x.axes) - 2,), (len(x.axes) - 1,), x.axes) for x in leaves]
        change = jnp.where(count > 0, 1 + (count % self.interval == 0), 0)
        branches = [
            lambda pairs: map_stacks(_eigenvectors, pairs, axes),
            lambda pairs: [basis for basis, _ in pairs],
            lambda pairs: map_stacks(_power_iterations, pairs, axes),
        ]
        new_bases = jax.lax.switch(change, branches, pairs)
        return tree.unflatten([x.replace(array=basis) for x, basis in zip(leaves, new_bases, strict=True)])


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
    rotated: tuple[int, ...]  # the dimensions with eigenvectors: 0 inputs, 1 outputs

    def factors(self) -> list[Placed]:
        """Returns the initial factors L and R: zeros [stacked…, n, n] for each rotated dimension of size n."""
        sizes_and_names = [(self.shape[i - 2], self.names[i]) for i in self.rotated]
        return [Placed(jnp.zeros((*self.shape[:-2], n, n)), (*self.stacked, name, None)) for n, name in sizes_and_names]

    def outer(self, x: jax.Array) -> list[jax.Array]:
        """Computes the outer product for each rotated dimension: x xᵀ for inputs and xᵀ x for outputs."""
        return [_einsum(("...IO,...JO->...IJ", "...IO,...IP->...OP")[i], x, x) for i in self.rotated]

    def rotate(self, x: jax.Array, bases: list[Placed], inverse: bool = False) -> jax.Array:
        """Computes Pᵀ x Q, or P x Qᵀ if `inverse`, leaving out P or Q if its dimension is not rotated."""
        for i, basis in zip(self.rotated, bases, strict=True):
            matrix = basis.array.mT if inverse else basis.array
            x = _einsum(("...IO,...IJ->...JO", "...IO,...OP->...IP")[i], x, matrix)
        return x


def _eigenvectors(bases: jax.Array, factors: jax.Array) -> jax.Array:
    """Computes the eigenvectors of the factors, [m, n, n]; `map_stacks` also passes the unused `bases`.

    On CPU, decomposing several matrices at once may deadlock if there are more simulated devices than cores, because
    LAPACK uses the threads on which the devices wait for each other. This happened in a test on eight devices.
    """
    del bases
    return jax.lax.map(lambda factor: jnp.linalg.eigh(factor)[1], factors)


def _power_iterations(bases: jax.Array, factors: jax.Array) -> jax.Array:
    """Applies one power iteration to the bases and orthogonalizes them in order of decreasing eigenvalue estimates.

    Arrays are [m, n, n], and one matrix is decomposed at a time, as in `_eigenvectors`.

    NOTE The released code also sorts the vectors and the second moments. Here, both keep their order.
    """

    def iterate(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        basis, factor = pair
        product = _einsum("IJ,JK->IK", factor, basis)
        order = jnp.argsort(-jnp.sum(basis * product, axis=0))
        return jnp.linalg.qr(product[:, order])[0][:, jnp.argsort(order)]

    return jax.lax.map(iterate, (bases, factors))


def _ema(mean: jax.Array, new: jax.Array, decay: float) -> jax.Array:
    return decay * mean + (1 - decay) * new


def _einsum(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Computes an einsum of two arrays in full float32 precision, also on a TPU."""
    return jnp.einsum(axes, x, y, precision="highest")
