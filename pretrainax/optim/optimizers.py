"""Defines the base classes of optimizers (chains of Optax transformations), AdamW and variants, Adagrad, and Lion."""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar, Literal, Optional, cast

import jax
import jax.numpy as jnp
import optax

from pretrainax.config import Experiment, kinds
from pretrainax.optim.decay import decay_mask
from pretrainax.optim.matrices import rms, scale_by_rms_ratio, stacked_axes
from pretrainax.optim.moments import MomentDtype, in_bfloat16
from pretrainax.optim.schedules import Rate
from pretrainax.optim.sharded_stacks import MatrixWork
from pretrainax.optim.transfer import Factor, Multipliers, scale_by
from pretrainax.sharding.param_paths import PyTree

BiasCorrection = Literal["moments", "rate", "none"]


class Optimizer(kinds.Optimizer):
    """Base class of optimizers. A subclass is a dataclass with the fields annotated here, and implements `build`."""

    learning_rate: float  # peak of the schedule
    weight_decay: float  # decoupled, times the learning rate
    clip_norm: Optional[float]  # maximum global norm of the gradient; None: no clipping
    # `update` takes `gradients_at`, a function from parameters to the gradients of the batch
    needs_gradient_function: ClassVar[bool] = False
    # `update` takes `factors`, a tree of learning-rate factors (optim/layers.py); False: the caller scales the updates
    takes_factors: ClassVar[bool] = False
    # `build` takes `multipliers`, so that config.transfer supports this optimizer
    transfers: ClassVar[bool] = False
    # fields that are arrays while an update is traced, so that runs with other values share the compiled update;
    # `build` must not branch on their values
    arguments: ClassVar[tuple[str, ...]] = ()

    @property
    def is_scale_invariant(self) -> bool:
        """Returns True if the same learning rate is suitable for models of all sizes.

        Such an optimizer's updates are relative to each matrix's RMS or norm, or to all previous gradients.
        """
        return False

    @property
    def gradients_per_update(self) -> float:
        """Returns the mean cost of computing gradients per update, in units of one forward and one backward pass."""
        return 1.0

    @property
    def has_gradient_point(self) -> bool:
        """Returns True if gradients are computed at a point other than the model's parameters.

        Storing this point takes as much memory as the parameters.
        """
        return type(self).gradient_point is not Optimizer.gradient_point

    def build(
        self, schedule: Rate, params_shape: PyTree, multipliers: Optional[PyTree] = None
    ) -> optax.GradientTransformationExtraArgs:
        """Builds the Optax transformation from gradients to updates, with the learning rate of `schedule`.

        Its method `update(gradients, state, params, step=…)` takes the number of completed updates as `step`.

        Args:
          schedule: maps the number of completed updates to the next update's learning rate.
          params_shape: the parameters, as arrays or shapes.
          multipliers: with config.transfer, the `Multipliers` of each parameter; only if `transfers` is True.
        """
        raise NotImplementedError

    def matrix_work(self, params_shape: PyTree, mesh_sizes: Mapping[str, int]) -> Iterable[MatrixWork]:
        """Returns the work of one device on whole matrices (optim/sharded_stacks.py); by default, there is none.

        Args:
          params_shape: the parameters, as arrays or shapes.
          mesh_sizes: size of each mesh axis.
        """
        del params_shape, mesh_sizes
        return []

    def gradient_point(self, params: PyTree, state: PyTree) -> PyTree:
        """Returns the point at which the next gradient is computed, by default the model's parameters.

        Args:
          params: the model's parameters.
          state: the state of the transformation that `build` returned.
        """
        del state
        return params


@dataclasses.dataclass
class Chain(Optimizer):
    """An optimizer that chains gradient clipping, an update direction, weight decay and the learning rate.

    The learning rate depends on the `step` argument of `update` rather than a counter in the state, because a skipped
    update would not advance such a counter.
    """

    arguments: ClassVar[tuple[str, ...]] = ("learning_rate", "weight_decay")

    # weight decay also applies to the embeddings of tokens, positions and token types (OLMo 2: False)
    decay_embeddings: bool = dataclasses.field(default=True, kw_only=True)
    decay_norms: bool = dataclasses.field(
        default=False, kw_only=True
    )  # weight decay also applies to the scales of norms (OLMo 2: True)
    # weight decay also applies to all biases, including the biases of norms
    decay_biases: bool = dataclasses.field(default=False, kw_only=True)

    def build(
        self, schedule: Rate, params_shape: PyTree, multipliers: Optional[PyTree] = None
    ) -> optax.GradientTransformationExtraArgs:
        return optax.chain(
            self.clipping(),
            *self.transferred(lambda m: m.gradient, multipliers),
            *self.directions(params_shape),
            *self.transferred(self.update_factor, multipliers),
            self.decaying(params_shape),
            scale_by_rate_of_step(schedule),
        )

    def transferred(
        self, factor: Callable[[Multipliers], Factor], multipliers: Optional[PyTree]
    ) -> Iterator[optax.GradientTransformation]:
        """Yields the transformation that multiplies updates by `factor`, unless `multipliers` is None."""
        if multipliers is not None:
            yield scale_by(jax.tree.map(factor, multipliers))

    def update_factor(self, multipliers: Multipliers) -> Factor:
        """Returns the factor of the update of a parameter before weight decay, with config.transfer."""
        return multipliers.relative_update if self.is_scale_invariant else multipliers.update

    @abc.abstractmethod  # the class is no ABC; the decorator only prevents a config from selecting this class
    def directions(self, params_shape: PyTree) -> Iterable[optax.GradientTransformation]:
        """Builds the transformations that turn clipped gradients into the update direction.

        Args:
          params_shape: the parameters, as arrays or shapes.
        """
        raise NotImplementedError

    def clipping(self) -> optax.GradientTransformation:
        """Builds the transformation that clips the global gradient norm to `clip_norm`, unless that is None."""
        return optax.clip_by_global_norm(self.clip_norm) if self.clip_norm is not None else optax.identity()

    def decaying(self, params_shape: PyTree) -> optax.GradientTransformation:
        """Builds the transformation that adds weight decay to the parameters selected by `decay_mask`."""
        return optax.add_decayed_weights(self.weight_decay, self.decay_mask(params_shape))

    def decay_mask(self, params_shape: PyTree) -> PyTree:
        """Builds the mask of the parameters that decay: matrices, and the groups that the fields select."""
        selected = [("embeddings", self.decay_embeddings), ("norms", self.decay_norms), ("biases", self.decay_biases)]
        return decay_mask(params_shape, ["matrices", *(group for group, decays in selected if decays)])

    def problems(self, experiment: Experiment) -> Iterator[str]:
        for name in ("b1", "b2", "b3", "momentum", "neuron_b2"):
            if not 0 <= (getattr(self, name, None) or 0.0) < 1:
                yield f"config.optimizer.{name} is {getattr(self, name)}, it must be in [0, 1)"
        for name in ("learning_rate", "adam_learning_rate", "epsilon", "clip_norm", "clip_rms", "update_rms"):
            value = getattr(self, name, None)
            if value is not None and not value > 0:
                yield f"config.optimizer.{name} is {value}, it must be above 0"
        if not self.weight_decay >= 0:
            yield f"config.optimizer.weight_decay is {self.weight_decay}, it must be at least 0"


def scale_by_rate_of_step(schedule: Rate) -> optax.GradientTransformationExtraArgs:
    """Builds a transformation that multiplies updates by -schedule(step); `step` is an argument of `update`."""

    def update(updates, state, params=None, *, step, **_):
        rate = schedule(step)
        return jax.tree.map(lambda u: -rate * u, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def scale_by_adam(
    b1: float, b2: float, epsilon: float, bias_correction: BiasCorrection = "moments"
) -> optax.GradientTransformation:
    """Builds the transformation from gradients to Adam's update direction, with float32 moments.

    Args:
      b1, b2, epsilon, bias_correction: see the fields of `AdamW`.
    """
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
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, algorithm 2).

        m, v = b1 m + (1 - b1) g, b2 v + (1 - b2) g²
        w -= rate(step) · (m̂ / (sqrt(v̂) + epsilon) + weight_decay · w)

    g is the gradient, clipped to clip_norm. m̂ and v̂ are the moments with bias correction. `decay_mask` selects the
    parameters that decay.

    NOTE torch also corrects the moments. TensorFlow and fairseq correct the learning rate instead, by the factor
    sqrt(1 - b2^t) / (1 - b1^t) at update t (Kingma and Ba 2014, section 2). In the first 1 / (1 - b2) updates, this has
    the effect of a larger epsilon.
    """

    transfers: ClassVar[bool] = True

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # decay rate of the first moment
    b2: float = 0.999  # decay rate of the second moment
    epsilon: float = 1e-8  # added to the square root of the second moment
    weight_decay: float = 0.01  # decoupled, times the learning rate
    clip_norm: Optional[float] = 1.0  # maximum global norm of the gradient; None: no clipping
    # multiplies the update of each matrix by max(1e-3, RMS of the matrix); for T5's unscaled initialization
    scale_by_parameter_rms: bool = False
    # corrects the "moments", as torch does; the "rate", as TensorFlow and fairseq do; or "none", as the code of BERT,
    # ELECTRA and DeBERTa does
    bias_correction: BiasCorrection = "moments"
    # bfloat16: both moments are stored in bfloat16 with stochastic rounding (optim/moments.py), 4 bytes per parameter
    # instead of 8
    moment_dtype: MomentDtype = "float32"

    @property
    def is_scale_invariant(self) -> bool:
        return self.scale_by_parameter_rms

    def directions(self, params_shape):
        adam = scale_by_adam(self.b1, self.b2, self.epsilon, self.bias_correction)
        yield adam if self.moment_dtype == "float32" else in_bfloat16(adam)
        yield scale_by_rms_ratio(_parameter_rms) if self.scale_by_parameter_rms else optax.identity()


@dataclasses.dataclass
class Lamb(Chain):
    """AdamW for large batches; the update of each matrix is proportional to the norm of the matrix.

    Source: You et al. 2019, arXiv 1904.00962, algorithm 2.

        u = m̂ / (sqrt(v̂) + epsilon) + weight_decay · w
        w -= rate(step) · |w| / |u| · u

    NOTE Parameters that do not decay, such as biases and norms, get Adam's unscaled update, as in ALBERT's code.
    Algorithm 2 scales these updates too.

    With config.transfer, a factor of an update must follow its normalization, which would cancel the factor. The decay
    is divided by the factor of Adam's update, so that rate · |w| / |u| · decay is the same for all sizes.
    """

    transfers: ClassVar[bool] = True

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # decay rate of the first moment
    b2: float = 0.999  # decay rate of the second moment
    epsilon: float = 1e-6  # added to the square root of the second moment
    weight_decay: float = 0.01  # decoupled, times the learning rate
    clip_norm: Optional[float] = 1.0  # maximum global norm of the gradient; None: no clipping
    bias_correction: BiasCorrection = "moments"  # as in AdamW; ALBERT: "none"

    @property
    def is_scale_invariant(self) -> bool:
        return True

    def build(self, schedule, params_shape, multipliers=None):
        mask, relative = self.decay_mask(params_shape), []
        if multipliers is not None:
            factors = jax.tree.map(lambda m, decays: m.relative_update if decays else 1.0, multipliers, mask)
            relative = [scale_by(factors)]
        return optax.chain(
            self.clipping(),
            *self.transferred(lambda m: m.gradient, multipliers),
            scale_by_adam(self.b1, self.b2, self.epsilon, self.bias_correction),
            *self.transferred(lambda m: m.update, multipliers),
            self.decaying(params_shape),
            optax.masked(scale_by_rms_ratio(_norm_ratio), mask),
            *relative,
            scale_by_rate_of_step(schedule),
        )


@dataclasses.dataclass
class StableAdamW(Chain):
    """AdamW with update clipping instead of gradient clipping: limits the update of each matrix after a gradient spike.

    Source: Wortsman et al. 2023, arXiv 2304.13013, algorithm 2, as in ModernBERT.

        w -= rate(step) / max(1, RMS(g / max(sqrt(v̂), epsilon))) · (m̂ / (sqrt(v̂) + epsilon) + weight_decay · w)

    The factor lowers the rate if the squared gradients exceed v̂. RMS is the root mean square over each matrix. m̂ and v̂
    are AdamW's bias-corrected moments.

    NOTE In the released ModernBERT, queries, keys and values share one matrix. Here, they have three matrices.
    """

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # decay rate of the first moment
    b2: float = 0.99  # decay rate of the second moment
    epsilon: float = 1e-6  # added to the square root of the second moment
    weight_decay: float = 0.01  # decoupled, times the learning rate
    clip_norm: Optional[float] = None  # maximum global norm of the gradient; None: no clipping

    def build(self, schedule, params_shape):
        adam = optax.chain(scale_by_adam(self.b1, self.b2, self.epsilon), self.decaying(params_shape))

        def scale(stacked, update, gradient, v):
            return update / jnp.maximum(1.0, rms(stacked, gradient * jax.lax.rsqrt(jnp.maximum(v, self.epsilon**2))))

        def update(updates, state, params=None):
            gradients = updates
            updates, state = adam.update(gradients, state, params)
            moments = cast(tuple[optax.ScaleByAdamState, ...], state)[0]
            v = optax.tree.bias_correction(moments.nu, self.b2, moments.count)
            return jax.tree.map(scale, stacked_axes(updates), updates, gradients, v), state

        stable = optax.GradientTransformation(adam.init, update)
        return optax.chain(self.clipping(), stable, scale_by_rate_of_step(schedule))


@dataclasses.dataclass
class AdEMAMix(Chain):
    """AdamW with an additional, slower first moment (Pagliardini et al. 2024, arXiv 2409.03137, algorithm 1).

        m2 = b3 m2 + (1 - b3) g
        w -= rate(step) · ((m̂ + alpha · m2) / (sqrt(v̂) + epsilon) + weight_decay · w)

    In the first `alpha_warmup_steps` steps, alpha grows linearly from 0 to `alpha`, and the decay rate of m2 grows from
    b1 to b3 such that its half-life grows linearly.
    """

    learning_rate: float = 1e-3  # peak of the schedule
    b1: float = 0.9  # decay rate of the fast first moment
    b2: float = 0.999  # decay rate of the second moment
    b3: float = 0.9999  # decay rate of the slow first moment
    alpha: float = 8.0  # weight of the slow first moment
    # number of steps in which alpha and b3 grow; in the paper, all steps of the run (config.train.steps)
    alpha_warmup_steps: int = 0
    epsilon: float = 1e-8  # added to the square root of the second moment
    weight_decay: float = 0.1  # decoupled, times the learning rate
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
        if self.b3 == 0:
            yield "config.optimizer.b3 is 0.0, it must be above 0: the slow first moment needs a half-life"
        elif self.alpha_warmup_steps and not 0 < self.b1 <= self.b3:
            yield (
                f"config.optimizer.b3 is {self.b3}, and rises from config.optimizer.b1 {self.b1} over "
                f"config.optimizer.alpha_warmup_steps {self.alpha_warmup_steps}: b3 must be at least b1, and b1 "
                "must be above 0"
            )


def _half_life(decay: float) -> float:
    """Computes the half-life in updates of a moving average with decay rate `decay`."""
    return math.log(0.5) / math.log(decay)


@dataclasses.dataclass
class Adagrad(Chain):
    """Adagrad, which divides gradients by the square root of the sum of all squared gradients (Duchi et al. 2011).

        v += g²
        w -= rate(step) · (g / sqrt(v) + weight_decay · w)

    The default settings are as in ELMo.
    """

    learning_rate: float = 0.2  # peak of the schedule
    initial_square: float = 0.1  # initial value of the sum of squares
    weight_decay: float = 0.0  # decoupled, times the learning rate
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
    """Lion: the update is the sign of an interpolation between momentum and gradient; half of Adam's state size.

    Source: Chen et al. 2023, arXiv 2302.06675, algorithm 2.

        w -= rate(step) · (sign(b1 m + (1 - b1) g) + weight_decay · w)
        m = b2 m + (1 - b2) g

    Apart from weight decay, each weight changes by ±rate. Suitable learning rates are therefore 3 to 10 times smaller
    than for Adam, and suitable weight decays 3 to 10 times larger (section 5).
    """

    learning_rate: float = 1e-4  # peak of the schedule
    b1: float = 0.9  # weight of the momentum in the interpolation with the gradient
    b2: float = 0.99  # decay rate of the momentum
    weight_decay: float = 0.1  # decoupled, times the learning rate
    clip_norm: Optional[float] = 1.0  # maximum global norm of the gradient; None: no clipping

    def directions(self, params_shape):
        yield optax.scale_by_lion(self.b1, self.b2, mu_dtype=jnp.float32)


def _norm_ratio(rms_of_matrix: jax.Array, rms_of_update: jax.Array) -> jax.Array:
    """Computes Lamb's factor |w| / |u|, or 1 if |w| or |u| is zero, so that a zero matrix can change.

    Args:
      rms_of_matrix: the RMS of a matrix.
      rms_of_update: the RMS of the matrix's update.
    """
    return jnp.where(
        (rms_of_matrix > 0.0) & (rms_of_update > 0.0), rms_of_matrix / jnp.maximum(rms_of_update, 1e-30), 1.0
    )


def _parameter_rms(rms_of_matrix: jax.Array, rms_of_update: jax.Array) -> jax.Array:
    """Computes max(1e-3, RMS of a matrix), as in Adafactor's relative steps (Shazeer and Stern 2018, section 8)."""
    del rms_of_update
    return jnp.maximum(1e-3, rms_of_matrix)
