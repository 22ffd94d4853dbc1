"""Muon: the matrices of the blocks go along directions of equal length, all other parameters by AdamW."""

import dataclasses
import math
from typing import Optional, Union

import jax
import optax

from pretrainax.optim.matrices import HEADS, STACKED, first_output, tree_of_names
from pretrainax.optim.optimizers import Chain, scale_by_adam, scale_by_rate_of_step
from pretrainax.sharding.param_paths import PyTree, is_stacked
from pretrainax.sharding.rules import axes_of_leaves

Axes = optax.contrib.MuonDimensionNumbers  # of a matrix in an array: those that are summed over, those of the outputs


@dataclasses.dataclass
class Muon(Chain):
    """Momentum, made orthogonal (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, and its code).

        m = momentum · m + (1 - momentum) · g
        w -= rate(step) · (sqrt(max(1, outputs / inputs)) · U + weight_decay · w)

    with U the matrix that has the singular vectors of momentum · m + (1 - momentum) · g and singular values near 1, by
    five steps of Newton and Schulz in float32. So the matrices of the blocks; embeddings, heads, biases and norms by
    AdamW.
    """

    learning_rate: float = 0.02  # peak of the schedule
    momentum: float = 0.95  # memory of the mean of gradients
    # of each update; 0.2 is Adam's (Liu et al. 2025, arXiv 2502.16982, section 2.2), None: by the shape, as above
    update_rms: Optional[float] = None
    split_heads: bool = False  # each head of a projection is a matrix; False: the projection is
    adam_learning_rate: Optional[float] = 3e-4  # peak for what AdamW trains; None: as learning_rate
    b1: float = 0.9  # of AdamW: memory of the mean of gradients
    b2: float = 0.95  # of AdamW: memory of the mean of their squares
    epsilon: float = 1e-10  # of AdamW: added to the root of that memory
    weight_decay: float = 0.0  # pull of weights to zero, times the rate; biases and norms have none
    clip_norm: Optional[float] = None  # largest norm of the whole gradient; None: any

    def build(self, schedule, params_shape):
        axes = self._axes(params_shape)
        labels = jax.tree.map(
            lambda a: "muon" if isinstance(a, Axes) else "adam",
            axes,
            is_leaf=lambda a: isinstance(a, (Axes, optax.MaskedNode)),
        )
        by = {"muon": self._orthogonal(axes), "adam": scale_by_adam(self.b1, self.b2, self.epsilon)}
        slower = (self.adam_learning_rate or self.learning_rate) / self.learning_rate
        return optax.chain(
            self.clipping(),
            optax.partition(by, labels),
            self.decaying(params_shape),
            optax.masked(optax.scale(slower), jax.tree.map(lambda label: label == "adam", labels)),
            scale_by_rate_of_step(schedule),
        )

    def _axes(self, params_shape: PyTree) -> PyTree:
        """Returns the axes of the matrices in each array that is Muon's; a MaskedNode for the others."""

        def of(name: str, axes: tuple[str, ...]) -> Union[Axes, optax.MaskedNode]:
            if not is_stacked(name) or not name.endswith("kernel"):
                return optax.MaskedNode()
            outputs = first_output(axes)
            left = [
                i for i, axis in enumerate(axes) if axis not in STACKED and not (self.split_heads and axis in HEADS)
            ]
            return Axes(tuple(i for i in left if i < outputs), tuple(i for i in left if i >= outputs))

        found = map(of, jax.tree.leaves(tree_of_names(params_shape)), axes_of_leaves(params_shape))
        return jax.tree.unflatten(jax.tree.structure(params_shape), list(found))

    def _orthogonal(self, axes: PyTree) -> optax.GradientTransformation:
        """Returns momentum with each matrix of it made orthogonal.

        NOTE The momentum is Optax's `trace`. That of its `scale_by_muon` is corrected for its start at zero, which the
        author's is not, and with Nesterov's step points elsewhere; so here the latter has none, and no state.
        """

        def update(updates, params):
            muon = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, eps=1e-7, weight_dimension_numbers=axes)
            updates, _ = muon.update(updates, muon.init(updates))
            return jax.tree.map(lambda u, a: self._size(a, u.shape) * u, updates, axes)

        momentum = optax.chain(optax.scale(1.0 - self.momentum), optax.trace(self.momentum, nesterov=True))
        return optax.chain(momentum, optax.stateless(update))

    def _size(self, axes: Axes, shape: tuple[int, ...]) -> float:
        inputs, outputs = (math.prod(shape[i] for i in some) for some in axes)
        if self.update_rms is not None:
            return self.update_rms * math.sqrt(max(inputs, outputs))
        return math.sqrt(max(1.0, outputs / inputs))
