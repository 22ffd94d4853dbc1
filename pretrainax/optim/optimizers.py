"""The optimizers, as chains of Optax's transformations."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Optional

import jax
import jax.numpy as jnp
import optax

from pretrainax.config import Experiment, kinds
from pretrainax.optim.decay import decay_mask
from pretrainax.optim.schedules import Rate
from pretrainax.sharding.param_paths import PyTree, is_stacked, parameter_names


class Optimizer(kinds.Optimizer):
    """Base of the optimizers. A subclass is a dataclass that has a `learning_rate` and gives `build`."""

    learning_rate: float  # peak of the schedule

    def build(self, schedule: Rate, params_shape: PyTree) -> optax.GradientTransformationExtraArgs:
        """Returns what makes an update of a gradient, with the learning rate of `schedule`.

        Its `update(gradients, state, params, step=…)` is given the step.
        """
        raise NotImplementedError


@dataclasses.dataclass
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, algorithm 2), moments in float32.

        m, v = b1 m + (1 - b1) g, b2 v + (1 - b2) g²
        w -= rate(step) · (m̂ / (sqrt(v̂) + epsilon) + weight_decay · w)

    with g the gradient clipped to clip_norm, m̂ and v̂ corrected for their start at zero, and decay where DECAY says.
    """

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # memory of the mean of gradients
    b2: float = 0.999  # memory of the mean of their squares
    epsilon: float = 1e-8  # added to the root of that memory
    weight_decay: float = 0.01  # pull of weights to zero, times the rate; biases and norms have none
    clip_norm: Optional[float] = 1.0  # largest norm of the whole gradient; None: any
    scale_by_parameter_rms: bool = False  # steps relative to the size of each matrix, for T5's unscaled init

    def build(self, schedule: Rate, params_shape: PyTree) -> optax.GradientTransformationExtraArgs:
        """Returns an optax chain; its `update(gradients, state, params, step=…)` needs the step, which gives the rate.

        The rate does not come from a counter of the chain's own: an update that is skipped would make it lag behind.
        """
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm) if self.clip_norm is not None else optax.identity(),
            optax.scale_by_adam(self.b1, self.b2, self.epsilon, mu_dtype=jnp.float32),
            _scale_by_size(_relative_to_the_matrix) if self.scale_by_parameter_rms else optax.identity(),
            optax.add_decayed_weights(self.weight_decay, decay_mask(params_shape)),
            _scale_by_rate_of_step(schedule),
        )

    def problems(self, experiment: Experiment) -> Iterator[str]:
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                yield f"config.optimizer.{name} is {getattr(self, name)}, it must be in [0, 1)"
        for name in ("learning_rate", "epsilon", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                yield f"config.optimizer.{name} is {value}, it must be above 0"
        if not self.weight_decay >= 0:
            yield f"config.optimizer.weight_decay is {self.weight_decay}, it must be at least 0"


@dataclasses.dataclass
class Lamb(Optimizer):
    """AdamW with the step of each matrix as long as the matrix is, for large batches (You et al. 2019, arXiv
    1904.00962, algorithm 2).

        u = m̂ / (sqrt(v̂) + epsilon) + weight_decay · w
        w -= rate(step) · |w| / |u| · u

    NOTE Biases and norms, which do not decay, get Adam's step as it is: so in ALBERT's code, not in the algorithm.
    """

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # memory of the mean of gradients
    b2: float = 0.999  # memory of the mean of their squares
    epsilon: float = 1e-6  # added to the root of that memory
    weight_decay: float = 0.01  # pull of weights to zero, times the rate; biases and norms have none
    clip_norm: Optional[float] = 1.0  # largest norm of the whole gradient; None: any

    problems = AdamW.problems

    def build(self, schedule: Rate, params_shape: PyTree) -> optax.GradientTransformationExtraArgs:
        """Returns a chain, with the arguments of AdamW's."""
        decays = decay_mask(params_shape)
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm) if self.clip_norm is not None else optax.identity(),
            optax.scale_by_adam(self.b1, self.b2, self.epsilon, mu_dtype=jnp.float32),
            optax.add_decayed_weights(self.weight_decay, decays),
            optax.masked(_scale_by_size(_as_long_as_the_matrix), decays),
            _scale_by_rate_of_step(schedule),
        )


def _as_long_as_the_matrix(size: jax.Array, update_size: jax.Array) -> jax.Array:
    """Returns |w| / |u|; 1 where one of them is zero, as a matrix that starts there would stay there."""
    return jnp.where((size > 0.0) & (update_size > 0.0), size / jnp.maximum(update_size, 1e-30), 1.0)


def _relative_to_the_matrix(size: jax.Array, update_size: jax.Array) -> jax.Array:
    """Returns max(1e-3, RMS(parameter)), as Adafactor's relative steps (Shazeer and Stern 2018, section 8)."""
    del update_size
    return jnp.maximum(1e-3, size)


def _scale_by_size(factor: Callable[[jax.Array, jax.Array], jax.Array]) -> optax.GradientTransformation:
    """Returns the transformation update × factor(RMS of the parameter, RMS of the update).

    Layers stacked in one array are matrices of their own: each has its own RMS.
    """

    def scale(name: str, update: jax.Array, param: jax.Array) -> jax.Array:
        axes = tuple(range(1, param.ndim)) if is_stacked(name) else None  # [L, …] -> [L, 1, …], or […] -> [1, …]
        size, update_size = (jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True)) for x in (param, update))
        return update * factor(size, update_size)

    def update(updates, state, params):
        names = jax.tree.unflatten(jax.tree.structure(params), parameter_names(params))
        return jax.tree.map(scale, names, updates, params), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _scale_by_rate_of_step(schedule: Rate) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation update × -rate(step), of the step that `update` is given."""

    def update(updates, state, params=None, *, step, **_):
        rate = schedule(step)
        return jax.tree.map(lambda u: -rate * u, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
