"""Implements Muon: orthogonalized momentum for the matrices of the blocks, and AdamW for all other parameters."""

import dataclasses
import math
from typing import Optional, Union

import jax
import optax

from pretrainax.optim.matrices import HEADS, STACKED, first_output, tree_of_names
from pretrainax.optim.optimizers import Chain, scale_by_adam, scale_by_rate_of_step
from pretrainax.sharding.param_paths import PyTree, is_stacked
from pretrainax.sharding.rules import axes_of_leaves

Axes = optax.contrib.MuonDimensionNumbers  # the input axes and the output axes of the matrices in an array


@dataclasses.dataclass
class Muon(Chain):
    """Muon: momentum, orthogonalized for each matrix.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, and the code of that post.

        m = momentum · m + (1 - momentum) · g
        w -= rate(step) · (sqrt(max(1, outputs / inputs)) · U + weight_decay · w)

    U has the singular vectors of momentum · m + (1 - momentum) · g and singular values near 1, after five Newton-Schulz
    steps in float32. Muon trains the matrices of the blocks; AdamW trains embeddings, heads, biases and norms.
    """

    learning_rate: float = 0.02  # peak of the schedule
    momentum: float = 0.95  # decay rate of the momentum
    # RMS of each matrix's update; 0.2 resembles Adam (Liu et al. 2025, arXiv 2502.16982, section 2.2); None: the factor
    # sqrt(max(1, outputs / inputs)) above
    update_rms: Optional[float] = None
    split_heads: bool = False  # treats each head of an attention projection as a matrix; False: all heads as one matrix
    adam_learning_rate: Optional[float] = 3e-4  # peak of the schedule for AdamW; None: learning_rate
    b1: float = 0.9  # AdamW: decay rate of the first moment
    b2: float = 0.95  # AdamW: decay rate of the second moment
    epsilon: float = 1e-10  # AdamW: added to the square root of the second moment
    weight_decay: float = 0.0  # decoupled, times the learning rate
    clip_norm: Optional[float] = None  # maximum global norm of the gradient; None: no clipping

    def build(self, schedule, params_shape):
        axes = self._axes(params_shape)
        labels = jax.tree.map(
            lambda a: "muon" if isinstance(a, Axes) else "adam",
            axes,
            is_leaf=lambda a: isinstance(a, (Axes, optax.MaskedNode)),
        )
        transformations = {
            "muon": self._orthogonalized_momentum(axes),
            "adam": scale_by_adam(self.b1, self.b2, self.epsilon),
        }
        relative_rate = (self.adam_learning_rate or self.learning_rate) / self.learning_rate
        return optax.chain(
            self.clipping(),
            optax.partition(transformations, labels),
            self.decaying(params_shape),
            optax.masked(optax.scale(relative_rate), jax.tree.map(lambda label: label == "adam", labels)),
            scale_by_rate_of_step(schedule),
        )

    def _axes(self, params_shape: PyTree) -> PyTree:
        """Returns the matrix axes of each parameter, or a MaskedNode for parameters that AdamW trains."""

        def axes_of(name: str, axes: tuple[str, ...]) -> Union[Axes, optax.MaskedNode]:
            if not is_stacked(name) or not name.endswith("kernel"):
                return optax.MaskedNode()
            outputs = first_output(axes)
            axes_of_matrix = [
                i for i, axis in enumerate(axes) if axis not in STACKED and not (self.split_heads and axis in HEADS)
            ]
            return Axes(
                tuple(i for i in axes_of_matrix if i < outputs), tuple(i for i in axes_of_matrix if i >= outputs)
            )

        leaves = map(axes_of, jax.tree.leaves(tree_of_names(params_shape)), axes_of_leaves(params_shape))
        return jax.tree.unflatten(jax.tree.structure(params_shape), list(leaves))

    def _orthogonalized_momentum(self, axes: PyTree) -> optax.GradientTransformation:
        """Builds the transformation from gradients to orthogonalized momentum, scaled as in the class docstring.

        NOTE Optax's `trace` computes the momentum, and `scale_by_muon` with beta=0 only orthogonalizes it. The momentum
        of `scale_by_muon` itself differs from the author's code: it is bias-corrected, and has a different direction
        with Nesterov momentum.
        """

        def update(updates, params):
            muon = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, eps=1e-7, weight_dimension_numbers=axes)
            updates, _ = muon.update(updates, muon.init(updates))
            return jax.tree.map(lambda u, a: self._update_scale(a, u.shape) * u, updates, axes)

        momentum = optax.chain(optax.scale(1.0 - self.momentum), optax.trace(self.momentum, nesterov=True))
        return optax.chain(momentum, optax.stateless(update))

    def _update_scale(self, axes: Axes, shape: tuple[int, ...]) -> float:
        inputs, outputs = (math.prod(shape[i] for i in group) for group in axes)
        if self.update_rms is not None:
            return self.update_rms * math.sqrt(max(inputs, outputs))
        return math.sqrt(max(1.0, outputs / inputs))
