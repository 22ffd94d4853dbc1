"""Schedule-free AdamW: the average of its iterates stands for a falling rate."""

import dataclasses
from typing import ClassVar, Optional

import jax
import jax.numpy as jnp
import optax

from pretrainax.optim.optimizers import Chain
from pretrainax.optim.schedules import WarmupConstant


@dataclasses.dataclass
class ScheduleFreeAdamW(Chain):
    """AdamW at a constant rate, whose model is an average of its iterates (Defazio et al. 2024, arXiv 2405.15682,
    algorithm 1).

        y = (1 - b1) z + b1 x; g the gradient at y
        z -= r · (g / (sqrt(v) + epsilon) + weight_decay · y), r = rate(step) · sqrt(1 - b2^updates)
        x = (1 - c) x + c z, c = r² / (sum of r² so far)

    The parameters of the model are x: they are what is evaluated, saved, exported and averaged. z and v are the state.
    """

    takes_factors: ClassVar[bool] = True  # of z, which x follows

    learning_rate: float = 2.5e-3  # the constant rate, after its warm-up
    b1: float = 0.9  # weight of the average where gradients are taken
    b2: float = 0.999  # memory of the mean of squares of gradients
    epsilon: float = 1e-8  # added to the root of that memory
    weight_decay: float = 0.0  # pull of weights to zero, times the rate; biases and norms have none
    clip_norm: Optional[float] = None  # largest norm of the whole gradient; None: any

    def build(self, schedule, params_shape):
        def at(rate, factors=None) -> optax.GradientTransformationExtraArgs:
            by_factors = optax.stateless(lambda steps, _: jax.tree.map(lambda u, f: -rate * f * u, steps, factors))
            iterates = optax.chain(
                self.clipping(),
                optax.scale_by_rms(self.b2, self.epsilon, eps_in_sqrt=False),
                self.decaying(params_shape),
                optax.scale(-rate) if factors is None else by_factors,
            )
            return optax.contrib.schedule_free(iterates, rate, self.b1)

        def update(updates, state, params=None, *, step, factors=None, **_):
            made = jnp.asarray(state.step_count, jnp.float32)  # updates, this one with them
            free = at(schedule(step) * jnp.sqrt(1.0 - self.b2**made), factors)
            point = self.gradient_point(params, state)
            moved, state = free.update(updates, state, point)
            average = optax.contrib.schedule_free_eval_params(state, optax.apply_updates(point, moved))
            return jax.tree.map(jnp.subtract, average, params), state

        return optax.GradientTransformationExtraArgs(at(0.0).init, update)

    def gradient_point(self, params, state):
        return jax.tree.map(lambda x, z: (1.0 - self.b1) * z + self.b1 * x, params, state.z)

    def problems(self, experiment):
        yield from super().problems(experiment)
        if self.b1 == 0:
            yield "config.optimizer.b1 is 0.0, it must be above 0: the average could not be told from y"
        if not isinstance(experiment.schedule, WarmupConstant):
            yield (
                f"config.schedule is {experiment.schedule}, and ScheduleFreeAdamW needs a rate that does not fall: set "
                '--config.schedule="WarmupConstant()"'
            )
