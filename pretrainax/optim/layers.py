"""Rates by layer: which parameters are trained, how fast beside the schedule, and from which step on.

The blocks of a stack are one array [L, …], so that what differs by layer is a vector along its first axis.
"""

import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pretrainax.config import LayersConfig, UserError
from pretrainax.optim.matrices import tree_of_names
from pretrainax.optim.optimizers import Optimizer
from pretrainax.sharding.param_paths import PyTree, numbers_of_layers, stack_of

# Paths, outside of stacks, of what comes before the first block or is shared by all: tables, their norms and
# projections, terms of positions, a convolution of the input. Everything else is above the last block.
_BELOW = re.compile(r"(^|/)((\w+_)?embedding(_\w+)?|relative_bias|convolution)/")


def layers_above(params: PyTree) -> PyTree:
    """Returns how many layers are above each parameter: of a stack [L, 1, …], whose blocks are layers; else [].

    Args:
      params: arrays or shapes.

    NOTE ELECTRA's code (model/optimization.py) has one more above all but the heads.
    """
    stacks = numbers_of_layers(params)
    most = max((total for _, total in stacks.values()), default=0)

    def above(name: str, x: PyTree) -> np.ndarray:
        if stack := stack_of(name):
            numbers, total = stacks[stack]
            return _of_layers([total - i for i in numbers], x)
        return np.array(most + 1 if _BELOW.search(name) else 0)

    return jax.tree.map(above, tree_of_names(params), params)


def _of_layers(values: Sequence, x: PyTree) -> np.ndarray:
    # [L] -> [L, 1, …]
    return np.array(values).reshape(-1, *[1] * (len(x.shape) - 1))


def trained(layers: LayersConfig, params: PyTree) -> PyTree:
    """Returns for each parameter whether it is trained at all, in the shapes of `layers_above`.

    Raises:
      UserError: none is.
    """

    stacks = numbers_of_layers(params)

    def is_trained(name: str, x: PyTree) -> np.ndarray:
        if stack := stack_of(name):
            return _of_layers([i >= layers.frozen for i in stacks[stack][0]], x)
        return np.array(not (layers.frozen_embeddings and _BELOW.search(name)))

    found = jax.tree.map(is_trained, tree_of_names(params), params)
    if not any(map(np.any, jax.tree.leaves(found))):
        raise UserError(f"config.layers leaves no parameter to train: {layers.describe()}")
    return found


def count_trained(layers: LayersConfig, params: PyTree) -> int:
    """Counts the numbers that are trained, of arrays or shapes."""
    shares = jax.tree.map(lambda on, x: int(on.sum()) * math.prod(x.shape) // on.size, trained(layers, params), params)
    return sum(jax.tree.leaves(shares))


def factors(layers: LayersConfig, params: PyTree, step: jax.typing.ArrayLike) -> PyTree:
    """Returns what the rate of each parameter is multiplied by at a step (0 is the first), as `layers_above` has it.

    rate_decay^above, 0 where frozen; with n layers above it a layer begins at step n · unfreeze_every.
    """

    def factor(above: np.ndarray, on: np.ndarray) -> jax.Array:
        own = jnp.asarray(layers.rate_decay**above * on, jnp.float32)
        if not layers.unfreeze_every:
            return own
        made = step - layers.unfreeze_every * above + 1  # updates, this one with them, since the layer has begun
        return own * jnp.clip(made / max(layers.unfreeze_warmup, 1), 0.0, 1.0)

    return jax.tree.map(factor, layers_above(params), trained(layers, params))


def by_layer(
    layers: LayersConfig, chosen: Optimizer, built: optax.GradientTransformationExtraArgs, params: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer with the rate of each layer: decay is by that rate too, and a frozen layer has neither.

    The state is that of `built`, of all parameters, frozen ones too. It sees the gradients of layers that wait, so that
    their first updates are no larger than others; those of frozen ones are to be zero (`only_trained`).

    Args:
      chosen: of the config.
      built: what it has built.
      params: arrays or shapes.
    """
    if layers == LayersConfig():
        return built

    def update(updates, state, params=None, *, step, **more):
        now = factors(layers, updates, step)
        own = {"factors": now} if chosen.takes_factors else {}
        updates, state = built.update(updates, state, params, step=step, **own, **more)
        scaled = updates if own else jax.tree.map(jnp.multiply, updates, now)
        return jax.tree.map(lambda u, f: jnp.where(f > 0, u, 0.0), scaled, now), state

    trained(layers, params)
    return optax.GradientTransformationExtraArgs(built.init, update)


def only_trained(layers: LayersConfig, gradients: PyTree) -> PyTree:
    """Returns gradients with zeros for what is frozen: it counts in no norm."""
    if layers == LayersConfig():
        return gradients
    return jax.tree.map(lambda g, on: jnp.where(on, g, 0.0), gradients, trained(layers, gradients))
