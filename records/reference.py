"""Times a fixed computation, so that budgets of different machines are comparable.

The computation does not use PretrainAX: a faster training step must not make the budget smaller. It is the gradient of
a feed-forward layer with a softmax. It has matrix products, exponentials and sums, as a training step has.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

ROWS, WIDTH, HIDDEN = 1024, 512, 2048
FLOPS = 5 * 2 * ROWS * WIDTH * HIDDEN  # two products forward, three backward
# Core-seconds of one computation on the machine that defines the budget: an Intel Xeon at 2.5 GHz, one core, jax 0.10.
# Three measurements next to other programs were 0.23, 0.25 and 0.25.
CORE_SECONDS = 0.24
_REPEATS = 5


def timer() -> Callable[[], float]:
    """Compiles the computation; returns a function that times it: the median core-seconds of several repetitions."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    x, up, down = (jax.random.normal(k, shape) / shape[0] ** 0.5 for k, shape in zip(keys, shapes, strict=True))
    gradient = jax.jit(jax.grad(_loss, argnums=(1, 2)))
    jax.block_until_ready(gradient(x, up, down))

    def core_seconds() -> float:
        seconds = []
        for _ in range(_REPEATS):
            started = time.process_time()
            jax.block_until_ready(gradient(x, up, down))
            seconds.append(time.process_time() - started)
        return statistics.median(seconds)

    return core_seconds


def _loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return -jnp.mean(jax.nn.log_softmax(jax.nn.gelu(x @ up) @ down)[:, 0])
