"""Implements Muon: orthogonalized momentum for the matrices of the blocks, and AdamW for all other parameters."""

import dataclasses
import math
from typing import ClassVar, Literal, Optional, Union

import jax
import jax.numpy as jnp
import optax

from pretrainax.optim.matrices import HEADS, STACKED, first_output, tree_of_names
from pretrainax.optim.optimizers import Chain, scale_by_adam, scale_by_rate_of_step
from pretrainax.optim.sharded_stacks import MatrixAxes, MatrixWork, map_stacks, stacks_of
from pretrainax.optim.transfer import Factor, Multipliers, scale_by
from pretrainax.sharding.param_paths import PyTree, is_stacked
from pretrainax.sharding.rules import axes_of_leaves

_ITERATIONS = 5  # of Newton-Schulz


@dataclasses.dataclass
class Muon(Chain):
    """Muon: momentum, orthogonalized for each matrix.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, and the code of that post.

        m = momentum · m + (1 - momentum) · g
        w -= rate(step) · (sqrt(max(1, outputs / inputs)) · U + weight_decay · w)

    U has the singular vectors of momentum · m + (1 - momentum) · g and singular values near 1, after five Newton-Schulz
    steps. Devices share these steps (optim/sharded_stacks.py). Muon trains the matrices of the blocks; AdamW trains
    embeddings, heads, biases and norms.
    """

    arguments: ClassVar[tuple[str, ...]] = (*Chain.arguments, "adam_learning_rate")
    transfers: ClassVar[bool] = True

    learning_rate: float = 0.02  # peak of the schedule
    momentum: float = 0.95  # decay rate of the momentum
    # RMS of each matrix's update; 0.2 resembles Adam (Liu et al. 2025, arXiv 2502.16982, section 2.2); None: the factor
    # sqrt(max(1, outputs / inputs)) above
    update_rms: Optional[float] = None
    split_heads: bool = False  # treats each head of an attention projection as a matrix; False: all heads as one matrix
    # NorMuon, for example 0.95: decay rate of the mean squares of each output neuron's update, which is divided by
    # their root; None: no normalization
    neuron_b2: Optional[float] = None
    # numbers of the Newton-Schulz steps. bfloat16, as in the code of the post, halves their time on a GPU and their
    # communication; the momentum remains float32
    products: Literal["float32", "bfloat16"] = "float32"
    adam_learning_rate: Optional[float] = 3e-4  # peak of the schedule for AdamW; None: learning_rate
    b1: float = 0.9  # AdamW: decay rate of the first moment
    b2: float = 0.95  # AdamW: decay rate of the second moment
    epsilon: float = 1e-10  # AdamW: added to the square root of the second moment
    weight_decay: float = 0.0  # decoupled, times the learning rate
    clip_norm: Optional[float] = None  # maximum global norm of the gradient; None: no clipping

    def build(self, schedule, params_shape, multipliers=None):
        axes = self._axes(params_shape)
        labels = jax.tree.map(
            lambda a: "muon" if isinstance(a, MatrixAxes) else "adam",
            axes,
            is_leaf=lambda a: isinstance(a, optax.MaskedNode),
        )
        transformations = {
            "muon": self._orthogonalized_momentum(axes),
            "adam": scale_by_adam(self.b1, self.b2, self.epsilon),
        }
        adam_rate = self.learning_rate if self.adam_learning_rate is None else self.adam_learning_rate
        return optax.chain(
            self.clipping(),
            *self.transferred(lambda m: m.gradient, multipliers),
            optax.partition(transformations, labels),
            *([] if multipliers is None else [scale_by(self._transferred_updates(axes, multipliers))]),
            self.decaying(params_shape),
            optax.masked(
                optax.scale(adam_rate / self.learning_rate), jax.tree.map(lambda label: label == "adam", labels)
            ),
            scale_by_rate_of_step(schedule),
        )

    def matrix_work(self, params_shape, mesh_sizes):
        leaves = jax.tree.leaves(self._axes(params_shape), is_leaf=lambda a: isinstance(a, optax.MaskedNode))
        pairs = zip(jax.tree.leaves(params_shape), leaves, strict=True)
        matrices = [(x.shape, a) for x, a in pairs if isinstance(a, MatrixAxes)]
        for stack in stacks_of(matrices, mesh_sizes):
            square, whole = stack.rows**2, stack.rows * stack.columns
            # An iteration computes A = X Xᵀ, A A and (b A + c A A) X.
            work = (2 * stack.rows * (2 * whole + square), 3 * whole + 4 * square)
            flops, operands = (_ITERATIONS * stack.matrices * x for x in work)
            yield MatrixWork(stack, flops, operands, jnp.dtype(self.products).itemsize)

    def _axes(self, params_shape: PyTree) -> PyTree:
        """Returns the axes of inputs (rows) and outputs (columns), or a MaskedNode for parameters that AdamW trains."""

        def axes_of(name: str, axes: tuple[str, ...]) -> Union[MatrixAxes, optax.MaskedNode]:
            if not is_stacked(name) or not name.endswith("kernel"):
                return optax.MaskedNode()
            outputs = first_output(axes)
            axes_of_matrix = [
                i for i, axis in enumerate(axes) if axis not in STACKED and not (self.split_heads and axis in HEADS)
            ]
            rows, columns = (
                tuple(i for i in axes_of_matrix if (i < outputs) == is_input) for is_input in (True, False)
            )
            return MatrixAxes(rows, columns, axes)

        leaves = map(axes_of, jax.tree.leaves(tree_of_names(params_shape)), axes_of_leaves(params_shape))
        return jax.tree.unflatten(jax.tree.structure(params_shape), list(leaves))

    def _orthogonalized_momentum(self, axes: PyTree) -> optax.GradientTransformation:
        """Builds the transformation from gradients to orthogonalized momentum, scaled as in the class docstring.

        NOTE Optax's `trace` computes the momentum, and `scale_by_muon` with beta=0 only orthogonalizes it. The momentum
        of `scale_by_muon` itself differs from the author's code: it is bias-corrected, and has a different direction
        with Nesterov momentum.
        """

        def orthogonalize(stack: jax.Array) -> jax.Array:
            dimensions = optax.contrib.MuonDimensionNumbers(1, 2)
            muon = optax.contrib.scale_by_muon(
                ns_steps=_ITERATIONS, beta=0.0, nesterov=False, eps=1e-7, weight_dimension_numbers=dimensions
            )
            return muon.update(stack, muon.init(stack))[0]

        def orthogonalize_all(updates, params):
            leaves, tree = jax.tree.flatten(updates)
            matrices = leaves if self.products == "float32" else [x.astype(self.products) for x in leaves]
            results = map_stacks(orthogonalize, [(x,) for x in matrices], jax.tree.leaves(axes))
            return tree.unflatten([u.astype(x.dtype) for u, x in zip(results, leaves, strict=True)])

        def scale(updates, params):
            return jax.tree.map(lambda u, a: self._update_scale(a, u.shape) * u, updates, axes)

        momentum = optax.chain(optax.scale(1.0 - self.momentum), optax.trace(self.momentum, nesterov=True))
        neurons = [] if self.neuron_b2 is None else [_normalized_neurons(self.neuron_b2, axes)]
        return optax.chain(momentum, optax.stateless(orthogonalize_all), *neurons, optax.stateless(scale))

    def _transferred_updates(self, axes: PyTree, multipliers: PyTree) -> PyTree:
        """Returns the factor of each parameter's update with config.transfer.

        The spectral norm of an update must be proportional to sqrt(outputs / inputs) (Yang et al. 2023, arXiv
        2310.17813, condition 1). With `split_heads`, the updates of heads with different inputs add up.
        """

        def norm(m: MatrixAxes, shape: tuple[int, ...]) -> float:
            _, inputs, outputs = m.sizes(shape)
            heads = [i for i in m.stacked if m.names[i] in HEADS and i < first_output(m.names)]
            return math.sqrt(outputs / inputs) / math.prod(shape[i] for i in heads) / self._update_scale(m, shape)

        def factor(m: Multipliers, matrix_axes: MatrixAxes | optax.MaskedNode) -> Factor:
            if isinstance(matrix_axes, optax.MaskedNode):
                return m.update
            return m.folded * norm(matrix_axes, m.shape) / norm(matrix_axes, m.base_shape)

        leaves = jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, optax.MaskedNode))
        return jax.tree.unflatten(jax.tree.structure(multipliers), map(factor, jax.tree.leaves(multipliers), leaves))

    def _update_scale(self, axes: MatrixAxes, shape: tuple[int, ...]) -> float:
        _, inputs, outputs = axes.sizes(shape)
        if self.update_rms is not None:
            return self.update_rms * math.sqrt(max(inputs, outputs))
        return math.sqrt(max(1.0, outputs / inputs))


def _normalized_neurons(decay: float, axes: PyTree) -> optax.GradientTransformation:
    """Builds the transformation that divides each output neuron's update by its root mean square in past updates.

    The norm of each matrix remains the same. Source: NorMuon, Li et al. 2025, arXiv 2510.05491, algorithm 1.

    NOTE The norm is that of Muon's update, as in the released code. In the paper, the RMS of each update is 0.2.

    Args:
      decay: decay rate of the mean squares.
      axes: the `MatrixAxes` of each parameter.
    """

    def squares(update, matrix_axes):
        return jnp.mean(jnp.square(update), axis=matrix_axes.rows, keepdims=True)

    def init(params):
        if not jax.tree.leaves(params):  # Optax inspects the structure with a tree without arrays
            return params
        return jax.tree.map(lambda x, a: jnp.zeros_like(squares(x, a)), params, axes)

    def normalize(update, mean_squares, matrix_axes):
        norm = lambda x: jnp.sqrt(  # noqa: E731
            jnp.sum(jnp.square(x), axis=(*matrix_axes.rows, *matrix_axes.columns), keepdims=True)
        )
        normalized = update / (jnp.sqrt(mean_squares) + 1e-10)
        return normalized * (norm(update) / (norm(normalized) + 1e-10))

    def update(updates, state, params=None):
        state = jax.tree.map(lambda v, u, a: decay * v + (1 - decay) * squares(u, a), state, updates, axes)
        return jax.tree.map(normalize, updates, state, axes), state

    return optax.GradientTransformation(init, update)
