"""Sophia: steps by the curvature of the loss, which is measured every few updates."""

import dataclasses
from typing import ClassVar, Optional

import jax
import jax.numpy as jnp
import optax

from pretrainax.optim.optimizers import Chain


@dataclasses.dataclass
class Sophia(Chain):
    """A mean of gradients over one of the curvature, clipped (Liu et al. 2023, arXiv 2305.14342, algorithm 3, with
    Hutchinson's estimate, algorithm 1).

        h = b2 h + (1 - b2) s · (H s) every `interval` updates, with signs s drawn at random and H the Hessian
        w -= rate(step) · (clip(m̂ / max(gamma · h, epsilon), 1) + weight_decay · w)

    An estimate is the work of 8/3 gradients, and keeps twice as much for its backward. Its kernels must have second
    derivatives: `train.attention` is to be "xla".

    NOTE Optax's m̂ is corrected for its start at zero, the paper's m is not, and Optax measures the curvature after the
    update, as the released code, where the algorithm does so before. Signs stand for the paper's normal numbers.
    """

    asks_for_gradients: ClassVar[bool] = True

    learning_rate: float = 3e-4  # peak of the schedule
    b1: float = 0.965  # memory of the mean of gradients
    b2: float = 0.99  # memory of the mean of the curvature
    gamma: float = 0.01  # of the curvature: more clips fewer weights; 10 to 50 % of them should not be
    interval: int = 10  # updates from one estimate of the curvature to the next
    epsilon: float = 1e-12  # smallest curvature that divides
    weight_decay: float = 0.1  # pull of weights to zero, times the rate; biases and norms have none
    clip_norm: Optional[float] = 1.0  # largest norm of the whole gradient; None: any

    @property
    def gradients_per_update(self):
        return 1.0 + (2 / 3 + 2.0) / self.interval  # the passes but for the weights' gradients, and all their tangents

    def directions(self, params_shape):
        yield optax.contrib.sophia(
            -1.0,  # the rate and the decay of the step come after it
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
        if not self.gamma > 0:
            yield f"config.optimizer.gamma is {self.gamma}, it must be above 0"
        if self.interval < 1:
            yield f"config.optimizer.interval is {self.interval}, it must be at least 1"
        if experiment.train.attention != "xla":
            yield (
                f"config.train.attention is {experiment.train.attention!r}, and Sophia needs gradients of gradients, "
                "which other kernels than xla do not have: set --config.train.attention=xla"
            )


def _hutchinson() -> optax.GradientTransformationExtraArgs:
    """Returns the estimate of the diagonal of the Hessian, signs · (Hessian · signs).

    NOTE Optax's differentiates the loss of a batch that it holds whole; this one the gradients, as micro-batches make
    them. Its signs follow from the step, so that nothing is kept of them.
    """

    def update(updates, state, params=None, *, step, gradients_at, **_):
        key = jax.random.fold_in(jax.random.key(0), step)
        signs = optax.tree.random_like(key, params, jax.random.rademacher)
        products = jax.jvp(gradients_at, (params,), (signs,))[1]
        return jax.tree.map(jnp.multiply, signs, products), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
