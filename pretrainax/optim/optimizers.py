"""Says what an optimizer is, a chain of Optax's transformations, and has the plain ones: Adam and its kin, Lion."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal, Optional, cast

import jax
import jax.numpy as jnp
import optax

from pretrainax.config import Experiment, kinds
from pretrainax.optim.decay import decay_mask
from pretrainax.optim.matrices import rms, scale_by_size, stacked_axes
from pretrainax.optim.schedules import Rate
from pretrainax.sharding.param_paths import PyTree

BiasCorrection = Literal["moments", "rate", "none"]


class Optimizer(kinds.Optimizer):
    """Base of the optimizers. A subclass is a dataclass that has a `learning_rate` and gives `build`."""

    learning_rate: float  # peak of the schedule
    asks_for_gradients: ClassVar[bool] = False  # its update takes `gradients_at`, parameters -> gradients of the batch
    # its update takes `factors` of the rate, a tree (optim/layers.py); that of others is multiplied by them
    takes_factors: ClassVar[bool] = False

    @property
    def is_relative(self) -> bool:
        """Returns True if one rate fits models of all sizes: an update is relative to the size of its matrix, or to the
        sizes of all gradients before."""
        return False

    @property
    def gradients_per_update(self) -> float:
        """Tells how many gradients' work an update is, on average."""
        return 1.0

    @property
    def moves_the_gradient(self) -> bool:
        """Returns True if it is taken elsewhere than at the parameters, which are then there twice."""
        return type(self).gradient_point is not Optimizer.gradient_point

    def build(self, schedule: Rate, params_shape: PyTree) -> optax.GradientTransformationExtraArgs:
        """Returns what makes an update of a gradient, with the learning rate of `schedule`.

        Its `update(gradients, state, params, step=…)` is given the step.
        """
        raise NotImplementedError

    def gradient_point(self, params: PyTree, state: PyTree) -> PyTree:
        """Returns the parameters at which the next gradient is taken, if they are not the model's own.

        Args:
          state: of what `build` has returned.
        """
        del state
        return params


class Chain(Optimizer):
    """An optimizer that clips the gradient, makes a direction of it, and goes there with decay, by the step's rate.

    The rate does not come from a counter of the chain's own: an update that is skipped would make it lag behind.
    """

    weight_decay: float
    clip_norm: Optional[float]

    def build(self, schedule: Rate, params_shape: PyTree) -> optax.GradientTransformationExtraArgs:
        return optax.chain(
            self.clipping(),
            *self.directions(params_shape),
            self.decaying(params_shape),
            scale_by_rate_of_step(schedule),
        )

    def directions(self, params_shape: PyTree) -> Iterable[optax.GradientTransformation]:
        """Returns what makes a direction of a clipped gradient."""
        raise NotImplementedError

    def clipping(self) -> optax.GradientTransformation:
        """Returns what scales the gradient of all parameters down to clip_norm."""
        return optax.clip_by_global_norm(self.clip_norm) if self.clip_norm is not None else optax.identity()

    def decaying(self, params_shape: PyTree) -> optax.GradientTransformation:
        """Returns what adds the pull to zero, where DECAY says."""
        return optax.add_decayed_weights(self.weight_decay, decay_mask(params_shape))

    def problems(self, experiment: Experiment) -> Iterator[str]:
        for name in ("b1", "b2", "b3", "momentum"):
            if not 0 <= getattr(self, name, 0.0) < 1:
                yield f"config.optimizer.{name} is {getattr(self, name)}, it must be in [0, 1)"
        for name in ("learning_rate", "adam_learning_rate", "epsilon", "clip_norm", "clip_rms", "update_rms"):
            value = getattr(self, name, None)
            if value is not None and not value > 0:
                yield f"config.optimizer.{name} is {value}, it must be above 0"
        if not self.weight_decay >= 0:
            yield f"config.optimizer.weight_decay is {self.weight_decay}, it must be at least 0"


def scale_by_rate_of_step(schedule: Rate) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation update × -rate(step), of the step that `update` is given."""

    def update(updates, state, params=None, *, step, **_):
        rate = schedule(step)
        return jax.tree.map(lambda u: -rate * u, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def scale_by_adam(
    b1: float, b2: float, epsilon: float, bias_correction: BiasCorrection = "moments"
) -> optax.GradientTransformation:
    """Returns Adam's direction, with moments in float32: Optax's, or one of the same state with another correction."""
    optax_adam = optax.scale_by_adam(b1, b2, epsilon, mu_dtype=jnp.float32)
    if bias_correction == "moments":
        return optax_adam

    def update(updates, state, params=None):
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment(updates, state.nu, b2, 2)
        count = optax.safe_increment(state.count)
        rate = jnp.sqrt(1.0 - b2**count) / (1.0 - b1**count) if bias_correction == "rate" else 1.0
        updates = jax.tree.map(lambda m, v: rate * m / (jnp.sqrt(v) + epsilon), mu, nu)
        return updates, state._replace(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(optax_adam.init, update)


@dataclasses.dataclass
class AdamW(Chain):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, algorithm 2), moments in float32.

        m, v = b1 m + (1 - b1) g, b2 v + (1 - b2) g²
        w -= rate(step) · (m̂ / (sqrt(v̂) + epsilon) + weight_decay · w)

    with g the gradient clipped to clip_norm, m̂ and v̂ corrected for their start at zero, and decay where DECAY says.

    NOTE So in torch. TensorFlow and fairseq correct the rate instead, by sqrt(1 - b2^t) / (1 - b1^t) at update t
    (Kingma and Ba 2014, section 2), by which epsilon is larger in the first 1 / (1 - b2) updates.
    """

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # memory of the mean of gradients
    b2: float = 0.999  # memory of the mean of their squares
    epsilon: float = 1e-8  # added to the root of that memory
    weight_decay: float = 0.01  # pull of weights to zero, times the rate; biases and norms have none
    clip_norm: Optional[float] = 1.0  # largest norm of the whole gradient; None: any
    scale_by_parameter_rms: bool = False  # steps relative to the size of each matrix, for T5's unscaled init
    # of memories that start at zero: "rate" as in TensorFlow and fairseq, "none" as BERT, ELECTRA, DeBERTa were trained
    bias_correction: BiasCorrection = "moments"

    @property
    def is_relative(self) -> bool:
        return self.scale_by_parameter_rms

    def directions(self, params_shape):
        yield scale_by_adam(self.b1, self.b2, self.epsilon, self.bias_correction)
        yield scale_by_size(_relative_to_the_matrix) if self.scale_by_parameter_rms else optax.identity()


@dataclasses.dataclass
class Lamb(Chain):
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
    bias_correction: BiasCorrection = "moments"  # of memories that start at zero; "none" as ALBERT was trained

    @property
    def is_relative(self) -> bool:
        return True

    def build(self, schedule, params_shape):
        return optax.chain(
            self.clipping(),
            scale_by_adam(self.b1, self.b2, self.epsilon, self.bias_correction),
            self.decaying(params_shape),
            optax.masked(scale_by_size(_as_long_as_the_matrix), decay_mask(params_shape)),
            scale_by_rate_of_step(schedule),
        )


@dataclasses.dataclass
class StableAdamW(Chain):
    """AdamW that goes slower where squares outgrow their memory, in the place of clipped gradients (Wortsman et al.
    2023, arXiv 2304.13013, algorithm 2): ModernBERT's.

        w -= rate(step) / max(1, RMS(g / max(sqrt(v̂), epsilon))) · (m̂ / (sqrt(v̂) + epsilon) + weight_decay · w)

    with the root mean square RMS of each matrix. NOTE In ModernBERT's release, queries, keys and values are one matrix.
    """

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # memory of the mean of gradients
    b2: float = 0.99  # memory of the mean of their squares
    epsilon: float = 1e-6  # added to the root of that memory
    weight_decay: float = 0.01  # pull of weights to zero, times the rate; biases and norms have none
    clip_norm: Optional[float] = None  # largest norm of the whole gradient; None: any

    def build(self, schedule, params_shape):
        adam = optax.chain(scale_by_adam(self.b1, self.b2, self.epsilon), self.decaying(params_shape))

        def slowed(stacked, update, gradient, v):
            return update / jnp.maximum(1.0, rms(stacked, gradient * jax.lax.rsqrt(jnp.maximum(v, self.epsilon**2))))

        def update(updates, state, params=None):
            gradients = updates
            updates, state = adam.update(gradients, state, params)
            moments = cast(tuple[optax.ScaleByAdamState, ...], state)[0]
            v = optax.tree.bias_correction(moments.nu, self.b2, moments.count)
            return jax.tree.map(slowed, stacked_axes(updates), updates, gradients, v), state

        slower = optax.GradientTransformation(adam.init, update)
        return optax.chain(self.clipping(), slower, scale_by_rate_of_step(schedule))


@dataclasses.dataclass
class AdEMAMix(Chain):
    """AdamW with a second, much slower mean of gradients (Pagliardini et al. 2024, arXiv 2409.03137, algorithm 1).

        w -= rate(step) · ((m̂ + alpha · m2) / (sqrt(v̂) + epsilon) + weight_decay · w)

    with m2 = b3 m2 + (1 - b3) g. Over `rise_steps`, alpha grows from 0, and the half-life of b3 from that of b1.
    """

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # memory of the fast mean of gradients
    b2: float = 0.999  # memory of the mean of their squares
    b3: float = 0.9999  # memory of the slow mean of gradients
    alpha: float = 8.0  # weight of the slow mean
    rise_steps: int = 0  # over which alpha and b3 rise; the paper: all of the run, here config.train.steps
    epsilon: float = 1e-8  # added to the root of the memory of squares
    weight_decay: float = 0.1  # pull of weights to zero, times the rate; biases and norms have none
    clip_norm: Optional[float] = 1.0  # largest norm of the whole gradient; None: any

    def directions(self, params_shape):
        if self.rise_steps:
            alpha = optax.linear_schedule(0.0, self.alpha, self.rise_steps)
            half_life = optax.linear_schedule(_half_life(self.b1), _half_life(self.b3), self.rise_steps)
        else:
            alpha, half_life = self.alpha, optax.constant_schedule(_half_life(self.b3))
        yield optax.contrib.scale_by_ademamix(
            self.b1, self.b2, lambda made: 0.5 ** (1.0 / half_life(made)), alpha, self.epsilon, mu_dtype=jnp.float32
        )

    def problems(self, experiment):
        yield from super().problems(experiment)
        for name in ("rise_steps", "alpha"):
            if not getattr(self, name) >= 0:
                yield f"config.optimizer.{name} is {getattr(self, name)}, it must be at least 0"
        if self.rise_steps and not 0 < self.b1 <= self.b3:
            yield (
                f"config.optimizer.b3 is {self.b3}, and rises from config.optimizer.b1, {self.b1}, over "
                f"config.optimizer.rise_steps {self.rise_steps}: it must be at least that, and that above 0"
            )


def _half_life(memory: float) -> float:
    """Returns how many updates a mean needs to forget half of what it holds."""
    return math.log(0.5) / math.log(memory)


@dataclasses.dataclass
class Adagrad(Chain):
    """Goes by the gradient over the root of the sum of all its squares (Duchi et al. 2011): ELMo's.

    v += g²;  w -= rate(step) · (g / sqrt(v) + weight_decay · w)
    """

    learning_rate: float = 0.2  # peak of the schedule
    initial_square: float = 0.1  # what the sum of squares begins with
    weight_decay: float = 0.0  # pull of weights to zero, times the rate; biases and norms have none
    clip_norm: Optional[float] = None  # largest norm of the whole gradient; None: any

    @property
    def is_relative(self) -> bool:
        return True

    def directions(self, params_shape):
        yield optax.scale_by_rss(self.initial_square, eps=0.0)

    def problems(self, experiment):
        yield from super().problems(experiment)
        if self.initial_square < 0:
            yield f"config.optimizer.initial_square is {self.initial_square}, it must be at least 0"


@dataclasses.dataclass
class Lion(Chain):
    """Goes by the signs of a mean of gradients, the last one twice in it (Chen et al. 2023, arXiv 2302.06675,
    algorithm 2): half of Adam's memory.

        w -= rate(step) · (sign(b1 m + (1 - b1) g) + weight_decay · w)
        m = b2 m + (1 - b2) g

    All steps are as long as the rate, so that a good one is 3 to 10 times smaller than Adam's, and the decay as many
    times larger (section 5).
    """

    learning_rate: float = 1e-4  # peak of the schedule
    b1: float = 0.9  # weight of the mean against the gradient, in the sign
    b2: float = 0.99  # memory of the mean of gradients
    weight_decay: float = 0.1  # pull of weights to zero, times the rate; biases and norms have none
    clip_norm: Optional[float] = 1.0  # largest norm of the whole gradient; None: any

    def directions(self, params_shape):
        yield optax.scale_by_lion(self.b1, self.b2, mu_dtype=jnp.float32)


def _as_long_as_the_matrix(size: jax.Array, update_size: jax.Array) -> jax.Array:
    """Returns |w| / |u|; 1 where one of them is zero, as a matrix that starts there would stay there."""
    return jnp.where((size > 0.0) & (update_size > 0.0), size / jnp.maximum(update_size, 1e-30), 1.0)


def _relative_to_the_matrix(size: jax.Array, update_size: jax.Array) -> jax.Array:
    """Returns max(1e-3, RMS(parameter)), as Adafactor's relative steps (Shazeer and Stern 2018, section 8)."""
    del update_size
    return jnp.maximum(1e-3, size)
