"""Implements Sophia, a second-order optimizer that estimates the diagonal of the Hessian every few updates."""

import dataclasses
from typing import ClassVar, Optional

import jax
import jax.numpy as jnp
import optax

from pretrainax.optim.optimizers import Chain


@dataclasses.dataclass
class Sophia(Chain):
    """A second-order optimizer: divides the first moment by a moving average of the curvature, and clips the quotient.

    Source: Liu et al. 2023, arXiv 2305.14342, algorithm 3, with Hutchinson's estimate of the curvature (algorithm 1).

        h = b2 h + (1 - b2) s · (H s) every `interval` updates, with random signs s and the Hessian H
        w -= rate(step) · (clip(m̂ / max(gamma · h, epsilon), 1) + weight_decay · w)

    The curvature h estimates the diagonal of H. Computing an estimate costs as much as 8/3 gradients, and stores twice
    as many residuals for the backward pass as a gradient. It requires second derivatives, which only the attention
    kernel "xla" supports.

    NOTE Optax's m̂ has a bias correction, but the paper's m does not. Like the released code, Optax estimates the
    curvature after the update, while algorithm 3 estimates it before the update. Random signs replace the paper's
    normally distributed numbers.
    """

    needs_gradient_function: ClassVar[bool] = True

    learning_rate: float = 3e-4  # peak of the schedule
    b1: float = 0.965  # decay rate of the first moment
    b2: float = 0.99  # decay rate of the moving average of the curvature
    # factor of the curvature; a larger factor clips fewer updates; 10 to 50 % of the updates should not be clipped
    gamma: float = 0.01
    interval: int = 10  # number of updates between estimates of the curvature
    epsilon: float = 1e-12  # smallest divisor
    weight_decay: float = 0.1  # decoupled, times the learning rate
    clip_norm: Optional[float] = 1.0  # maximum global norm of the gradient; None: no clipping

    @property
    def gradients_per_update(self):
        # 2/3 of a gradient for the primal passes, without the gradients of weights; 2 gradients for the tangents
        return 1.0 + (2 / 3 + 2.0) / self.interval

    def directions(self, params_shape):
        yield optax.contrib.sophia(
            -1.0,  # learning rate; the schedule and weight decay follow later in the chain
            b1=self.b1,
            b2=self.b2,
            eps=self.epsilon,
            weight_decay=0.0,
            gamma=self.gamma,
            update_interval=self.interval,
            hessian_diagonal_fn=_hutchinson(),
            mu_dtype=jnp.float32,
        )

    def problems(self, experiment):
        yield from super().problems(experiment)
        if products := experiment.train.products:
            yield (
                f"config.train.products is {products!r}, and rounding to 8 bits has no second derivatives, which "
                "Sophia requires: set --config.train.products="
            )
        if not self.gamma > 0:
            yield f"config.optimizer.gamma is {self.gamma}, it must be above 0"
        if self.interval < 1:
            yield f"config.optimizer.interval is {self.interval}, it must be at least 1"
        if experiment.train.attention != "xla":
            yield (
                f"config.train.attention is {experiment.train.attention!r}, and Sophia requires second derivatives, "
                "which only the xla kernel has: set --config.train.attention=xla"
            )


def _hutchinson() -> optax.GradientTransformationExtraArgs:
    """Builds a transformation whose update is Hutchinson's estimate of the Hessian's diagonal, signs · (H · signs).

    NOTE Optax's version differentiates the loss of a whole batch. This one differentiates gradients, so that it works
    with gradient accumulation. The random signs are a function of the step, so the transformation is stateless.
    """

    def update(updates, state, params=None, *, step, gradients_at, **_):
        key = jax.random.fold_in(jax.random.key(0), step)
        signs = optax.tree.random_like(key, params, jax.random.rademacher)
        products = jax.jvp(gradients_at, (params,), (signs,))[1]
        return jax.tree.map(jnp.multiply, signs, products), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
