"""Implements the exponential moving average of the parameters (`config.train.ema_decay`)."""

import math
from typing import Optional, cast

import jax
import jax.numpy as jnp
import optax

from pretrainax.sharding.param_paths import PyTree


def updated_average(average: Optional[PyTree], params: PyTree, step: jax.Array, decay: Optional[float]) -> PyTree:
    """Returns the moving average of the parameters after update number `step` + 1 to `params`, or None without decay.

    After step t, it is the mean of the parameters after each step s <= t, weighted by decay^(t - s). A skipped step
    contributes its unchanged parameters. The initial parameters have no weight, as in Adam's bias-corrected moments.
    """
    if average is None or decay is None:
        return None
    weights = -jnp.expm1((step + 1) * math.log(decay)) / (1.0 - decay)  # 1 + decay + … + decay^step
    return cast(PyTree, optax.incremental_update(params, average, 1.0 / weights))
