"""The base classes of optimizers, which chain Optax transformations; AdamW and its variants, Adagrad and Lion."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal, Optional, cast

import jax
import jax.numpy as jnp
import optax

from pretrainax.config import Experiment, kinds
from pretrainax.optim.decay import decay_mask
from pretrainax.optim.matrices import rms, scale_by_rms_ratio, stacked_axes
from pretrainax.optim.schedules import Rate
from pretrainax.sharding.param_paths import PyTree

BiasCorrection = Literal["moments", "rate", "none"]


class Optimizer(kinds.Optimizer):
    """Base class of optimizers. A subclass is a dataclass with a `learning_rate` that implements `build`."""

    learning_rate: float  # peak of the schedule
    needs_gradient_function: ClassVar[bool] = (
        False  # `update` takes `gradients_at`, parameters -> gradients of the batch
    )
    # `update` takes `factors`, a tree of factors of the rate (optim/layers.py); updates of others are scaled by it
    takes_factors: ClassVar[bool] = False

    @property
    def is_scale_invariant(self) -> bool:
        """Returns True if one learning rate fits models of all sizes.

        Then an update is relative to the size of its matrix, or to the sizes of all previous gradients.
        """
        return False

    @property
    def gradients_per_update(self) -> float:
        """Returns the mean cost of an update in gradient computations."""
        return 1.0

    @property
    def has_gradient_point(self) -> bool:
        """Returns True if the gradient is taken at other parameters than the model's; both sets need memory."""
        return type(self).gradient_point is not Optimizer.gradient_point

    def build(self, schedule: Rate, params_shape: PyTree) -> optax.GradientTransformationExtraArgs:
        """Returns the gradient transformation with the learning rate of `schedule`.

        Its `update(gradients, state, params, step=…)` takes the step.
        """
        raise NotImplementedError

    def gradient_point(self, params: PyTree, state: PyTree) -> PyTree:
        """Returns the parameters at which the next gradient is taken; `params` by default.

        Args:
          state: the state of the transformation that `build` returned.
        """
        del state
        return params


class Chain(Optimizer):
    """An optimizer that chains clipping, the update direction, weight decay and the learning rate of the step.

    The learning rate does not use a counter in the state, which would lag behind after a skipped update.
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
        """Returns the transformations from the clipped gradient to the update direction."""
        raise NotImplementedError

    def clipping(self) -> optax.GradientTransformation:
        """Returns global-norm gradient clipping at `clip_norm`."""
        return optax.clip_by_global_norm(self.clip_norm) if self.clip_norm is not None else optax.identity()

    def decaying(self, params_shape: PyTree) -> optax.GradientTransformation:
        """Returns the weight-decay transformation, masked by `DECAY`."""
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
    """Returns the transformation update × -rate(step), for the `step` argument of `update`."""

    def update(updates, state, params=None, *, step, **_):
        rate = schedule(step)
        return jax.tree.map(lambda u: -rate * u, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def scale_by_adam(
    b1: float, b2: float, epsilon: float, bias_correction: BiasCorrection = "moments"
) -> optax.GradientTransformation:
    """Returns Adam's direction with float32 moments: Optax's, or a variant of it with another bias correction."""
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
    """Adam with decoupled weight decay and float32 moments (Loshchilov and Hutter 2017, algorithm 2).

        m, v = b1 m + (1 - b1) g, b2 v + (1 - b2) g²
        w -= rate(step) · (m̂ / (sqrt(v̂) + epsilon) + weight_decay · w)

    g is the gradient clipped to clip_norm. m̂ and v̂ have a bias correction. DECAY selects the parameters that decay.

    NOTE torch does the same. TensorFlow and fairseq correct the rate instead, by sqrt(1 - b2^t) / (1 - b1^t) at update
    t (Kingma and Ba 2014, section 2), which makes epsilon effectively larger in the first 1 / (1 - b2) updates.
    """

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # decay rate of the first moment
    b2: float = 0.999  # decay rate of the second moment
    epsilon: float = 1e-8  # added to the square root of the second moment
    weight_decay: float = 0.01  # decoupled, times the learning rate; biases and norms do not decay
    clip_norm: Optional[float] = 1.0  # maximum global norm of the gradient; None: no clipping
    scale_by_parameter_rms: bool = False  # updates relative to the RMS of each matrix, for T5's unscaled init
    # "moments": as in torch; "rate": as in TensorFlow and fairseq; "none": as in BERT, ELECTRA and DeBERTa
    bias_correction: BiasCorrection = "moments"

    @property
    def is_scale_invariant(self) -> bool:
        return self.scale_by_parameter_rms

    def directions(self, params_shape):
        yield scale_by_adam(self.b1, self.b2, self.epsilon, self.bias_correction)
        yield scale_by_rms_ratio(_parameter_rms) if self.scale_by_parameter_rms else optax.identity()


@dataclasses.dataclass
class Lamb(Chain):
    """AdamW whose update of each matrix has the norm of the matrix, for large batches (You et al. 2019, arXiv
    1904.00962, algorithm 2).

        u = m̂ / (sqrt(v̂) + epsilon) + weight_decay · w
        w -= rate(step) · |w| / |u| · u

    NOTE Biases and norms, which do not decay, get the unscaled update of Adam, as in ALBERT's code. The algorithm
    scales them too.
    """

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # decay rate of the first moment
    b2: float = 0.999  # decay rate of the second moment
    epsilon: float = 1e-6  # added to the square root of the second moment
    weight_decay: float = 0.01  # decoupled, times the learning rate; biases and norms do not decay
    clip_norm: Optional[float] = 1.0  # maximum global norm of the gradient; None: no clipping
    bias_correction: BiasCorrection = "moments"  # as for AdamW; "none": as in ALBERT

    @property
    def is_scale_invariant(self) -> bool:
        return True

    def build(self, schedule, params_shape):
        return optax.chain(
            self.clipping(),
            scale_by_adam(self.b1, self.b2, self.epsilon, self.bias_correction),
            self.decaying(params_shape),
            optax.masked(scale_by_rms_ratio(_norm_ratio), decay_mask(params_shape)),
            scale_by_rate_of_step(schedule),
        )


@dataclasses.dataclass
class StableAdamW(Chain):
    """AdamW with a smaller rate if squared gradients exceed the second moment, instead of gradient clipping.

    Source: Wortsman et al. 2023, arXiv 2304.13013, algorithm 2, as in ModernBERT.

        w -= rate(step) / max(1, RMS(g / max(sqrt(v̂), epsilon))) · (m̂ / (sqrt(v̂) + epsilon) + weight_decay · w)

    RMS is the root mean square of each matrix. NOTE In ModernBERT's release, queries, keys and values are one matrix.
    """

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # decay rate of the first moment
    b2: float = 0.99  # decay rate of the second moment
    epsilon: float = 1e-6  # added to the square root of the second moment
    weight_decay: float = 0.01  # decoupled, times the learning rate; biases and norms do not decay
    clip_norm: Optional[float] = None  # maximum global norm of the gradient; None: no clipping

    def build(self, schedule, params_shape):
        adam = optax.chain(scale_by_adam(self.b1, self.b2, self.epsilon), self.decaying(params_shape))

        def scaled(stacked, update, gradient, v):
            return update / jnp.maximum(1.0, rms(stacked, gradient * jax.lax.rsqrt(jnp.maximum(v, self.epsilon**2))))

        def update(updates, state, params=None):
            gradients = updates
            updates, state = adam.update(gradients, state, params)
            moments = cast(tuple[optax.ScaleByAdamState, ...], state)[0]
            v = optax.tree.bias_correction(moments.nu, self.b2, moments.count)
            return jax.tree.map(scaled, stacked_axes(updates), updates, gradients, v), state

        stable = optax.GradientTransformation(adam.init, update)
        return optax.chain(self.clipping(), stable, scale_by_rate_of_step(schedule))


@dataclasses.dataclass
class AdEMAMix(Chain):
    """AdamW with a second, slower first moment (Pagliardini et al. 2024, arXiv 2409.03137, algorithm 1).

        w -= rate(step) · ((m̂ + alpha · m2) / (sqrt(v̂) + epsilon) + weight_decay · w)

    m2 = b3 m2 + (1 - b3) g. Over `alpha_warmup_steps`, alpha grows from 0, and the half-life of b3 from
    the one of b1.
    """

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # decay rate of the fast first moment
    b2: float = 0.999  # decay rate of the second moment
    b3: float = 0.9999  # decay rate of the slow first moment
    alpha: float = 8.0  # weight of the slow first moment
    alpha_warmup_steps: int = (
        0  # steps over which alpha and b3 rise; the paper uses all steps of the run, config.train.steps
    )
    epsilon: float = 1e-8  # added to the square root of the second moment
    weight_decay: float = 0.1  # decoupled, times the learning rate; biases and norms do not decay
    clip_norm: Optional[float] = 1.0  # maximum global norm of the gradient; None: no clipping

    def directions(self, params_shape):
        if self.alpha_warmup_steps:
            alpha = optax.linear_schedule(0.0, self.alpha, self.alpha_warmup_steps)
            half_life = optax.linear_schedule(_half_life(self.b1), _half_life(self.b3), self.alpha_warmup_steps)
        else:
            alpha, half_life = self.alpha, optax.constant_schedule(_half_life(self.b3))
        yield optax.contrib.scale_by_ademamix(
            self.b1, self.b2, lambda count: 0.5 ** (1.0 / half_life(count)), alpha, self.epsilon, mu_dtype=jnp.float32
        )

    def problems(self, experiment):
        yield from super().problems(experiment)
        for name in ("alpha_warmup_steps", "alpha"):
            if not getattr(self, name) >= 0:
                yield f"config.optimizer.{name} is {getattr(self, name)}, it must be at least 0"
        if self.alpha_warmup_steps and not 0 < self.b1 <= self.b3:
            yield (
                f"config.optimizer.b3 is {self.b3}, and rises from config.optimizer.b1 {self.b1} over "
                f"config.optimizer.alpha_warmup_steps {self.alpha_warmup_steps}: b3 must be at least b1, and b1 "
                "must be above 0"
            )


def _half_life(decay: float) -> float:
    """Returns the half-life of a moving average, in updates."""
    return math.log(0.5) / math.log(decay)


@dataclasses.dataclass
class Adagrad(Chain):
    """The gradient divided by the root of the sum of all its squares (Duchi et al. 2011), as in ELMo.

    v += g²;  w -= rate(step) · (g / sqrt(v) + weight_decay · w)
    """

    learning_rate: float = 0.2  # peak of the schedule
    initial_square: float = 0.1  # initial value of the sum of squares
    weight_decay: float = 0.0  # decoupled, times the learning rate; biases and norms do not decay
    clip_norm: Optional[float] = None  # maximum global norm of the gradient; None: no clipping

    @property
    def is_scale_invariant(self) -> bool:
        return True

    def directions(self, params_shape):
        yield optax.scale_by_rss(self.initial_square, eps=0.0)

    def problems(self, experiment):
        yield from super().problems(experiment)
        if self.initial_square < 0:
            yield f"config.optimizer.initial_square is {self.initial_square}, it must be at least 0"


@dataclasses.dataclass
class Lion(Chain):
    """The sign of an interpolation of momentum and gradient, with half of Adam's memory (Chen et al. 2023, arXiv
    2302.06675, algorithm 2).

        w -= rate(step) · (sign(b1 m + (1 - b1) g) + weight_decay · w)
        m = b2 m + (1 - b2) g

    Each update has the size of the rate, so a good rate is 3 to 10 times smaller than Adam's, and weight decay is
    larger by the same factor (section 5).
    """

    learning_rate: float = 1e-4  # peak of the schedule
    b1: float = 0.9  # weight of the momentum in the interpolation with the gradient
    b2: float = 0.99  # decay rate of the momentum
    weight_decay: float = 0.1  # decoupled, times the learning rate; biases and norms do not decay
    clip_norm: Optional[float] = 1.0  # maximum global norm of the gradient; None: no clipping

    def directions(self, params_shape):
        yield optax.scale_by_lion(self.b1, self.b2, mu_dtype=jnp.float32)


def _norm_ratio(size: jax.Array, update_size: jax.Array) -> jax.Array:
    """Returns |w| / |u|; 1 if either is zero, because a matrix of zeros would never change."""
    return jnp.where((size > 0.0) & (update_size > 0.0), size / jnp.maximum(update_size, 1e-30), 1.0)


def _parameter_rms(size: jax.Array, update_size: jax.Array) -> jax.Array:
    """Returns max(1e-3, RMS(parameter)), as in Adafactor's relative step sizes (Shazeer and Stern 2018, section 8)."""
    del update_size
    return jnp.maximum(1e-3, size)
