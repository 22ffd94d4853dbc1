"""Implements schedule-free AdamW, which averages its iterates instead of decaying the learning rate."""

import dataclasses
from typing import ClassVar, Optional

import jax
import jax.numpy as jnp
import optax

from pretrainax.optim.optimizers import Chain
from pretrainax.optim.schedules import WarmupConstant


@dataclasses.dataclass
class ScheduleFreeAdamW(Chain):
    """AdamW with a constant learning rate; the parameters of the model are an average of the iterates.

    Source: Defazio et al. 2024, arXiv 2405.15682, algorithm 1.

        y = (1 - b1) z + b1 x; g is the gradient at y, v the second moment of g
        z -= r · (g / (sqrt(v) + epsilon) + weight_decay · y), r = rate(step) · sqrt(1 - b2^updates)
        x = (1 - c) x + c z, c = r² / (sum of r² so far)

    The model's parameters, which evaluation, checkpoints, exports and moving averages use, are x. The optimizer state
    consists of the iterates z and the second moment v.
    """

    takes_factors: ClassVar[bool] = True  # the factors apply to the update of z

    learning_rate: float = 2.5e-3  # the constant rate after warmup
    b1: float = 0.9  # weight of the average x in y
    b2: float = 0.999  # decay rate of the second moment
    epsilon: float = 1e-8  # added to the square root of the second moment
    weight_decay: float = 0.0  # decoupled, times the learning rate
    clip_norm: Optional[float] = None  # maximum global norm of the gradient; None: no clipping

    def build(self, schedule, params_shape):
        def at_rate(rate, factors=None) -> optax.GradientTransformationExtraArgs:
            scale_by_factors = optax.stateless(
                lambda steps, _: jax.tree.map(lambda u, f: -rate * f * u, steps, factors)
            )
            iterates = optax.chain(
                self.clipping(),
                optax.scale_by_rms(self.b2, self.epsilon, eps_in_sqrt=False),
                self.decaying(params_shape),
                optax.scale(-rate) if factors is None else scale_by_factors,
            )
            return optax.contrib.schedule_free(iterates, rate, self.b1)

        def update(updates, state, params=None, *, step, factors=None, **_):
            count = jnp.asarray(state.step_count, jnp.float32)  # number of updates, including this update
            transformation = at_rate(schedule(step) * jnp.sqrt(1.0 - self.b2**count), factors)
            point = self.gradient_point(params, state)
            point_updates, state = transformation.update(updates, state, point)
            average = optax.contrib.schedule_free_eval_params(state, optax.apply_updates(point, point_updates))
            return jax.tree.map(jnp.subtract, average, params), state

        return optax.GradientTransformationExtraArgs(at_rate(0.0).init, update)

    def gradient_point(self, params, state):
        return jax.tree.map(lambda x, z: (1.0 - self.b1) * z + self.b1 * x, params, state.z)

    def problems(self, experiment):
        yield from super().problems(experiment)
        if self.b1 == 0:
            yield "config.optimizer.b1 is 0.0, it must be above 0: the average follows from y by a division by b1"
        if not isinstance(experiment.schedule, WarmupConstant):
            yield (
                f"config.schedule is {experiment.schedule}, and ScheduleFreeAdamW requires a constant rate: set "
                '--config.schedule="WarmupConstant()"'
            )
        elif experiment.schedule.anneal_steps:
            yield (
                f"config.schedule.anneal_steps is {experiment.schedule.anneal_steps}, and ScheduleFreeAdamW requires a "
                "constant rate: set --config.schedule.anneal_steps=0"
            )
        for number, phase in enumerate(experiment.phases):
            if phase.learning_rate not in (None, self.learning_rate):
                yield (
                    f"config.phases[{number}].learning_rate is {phase.learning_rate}, and ScheduleFreeAdamW requires a "
                    f"constant rate, config.optimizer.learning_rate {self.learning_rate}: remove it"
                )
