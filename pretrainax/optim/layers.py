"""Per-layer learning rates: frozen layers, layer-wise decay of the rate, and gradual unfreezing.

The blocks of a stack are one array [L, …], so a per-layer value is a vector along its first axis.
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
from pretrainax.sharding.param_paths import PyTree, layer_indices, stack_of

# Paths outside of stacks of parameters before the first block or shared by all blocks: embeddings, their norms and
# projections, position biases, the input convolution. All others are above the last block.
_BELOW = re.compile(r"(^|/)((\w+_)?embedding(_\w+)?|relative_bias|convolution)/")


def layers_above(params: PyTree) -> PyTree:
    """Returns the number of layers above each parameter: [L, 1, …] for a stack, whose blocks are the layers; else [].

    Args:
      params: arrays or shapes.

    NOTE ELECTRA's code (model/optimization.py) counts one more layer above all parameters but the heads.
    """
    stacks = layer_indices(params)
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


def trained_mask(layers: LayersConfig, params: PyTree) -> PyTree:
    """Returns flags, True for trained parameters, in the shapes of `layers_above`.

    Raises:
      UserError: no parameter is trained.
    """

    stacks = layer_indices(params)

    def is_trained(name: str, x: PyTree) -> np.ndarray:
        if stack := stack_of(name):
            return _of_layers([i >= layers.frozen for i in stacks[stack][0]], x)
        return np.array(not (layers.frozen_embeddings and _BELOW.search(name)))

    flags = jax.tree.map(is_trained, tree_of_names(params), params)
    if not any(map(np.any, jax.tree.leaves(flags))):
        raise UserError(f"config.layers leaves no parameter to train: {layers.describe()}")
    return flags


def count_trained(layers: LayersConfig, params: PyTree) -> int:
    """Returns the number of trained parameters; params: arrays or shapes."""
    shares = jax.tree.map(
        lambda on, x: int(on.sum()) * math.prod(x.shape) // on.size, trained_mask(layers, params), params
    )
    return sum(jax.tree.leaves(shares))


def rate_factors(layers: LayersConfig, params: PyTree, step: jax.typing.ArrayLike) -> PyTree:
    """Returns the factor of each parameter's learning rate at a step (0 is the first), in the shapes of `layers_above`.

    The factor is rate_decay^layers_above, and 0 for frozen parameters. With gradual unfreezing, a layer with n layers
    above it starts at step n · unfreeze_every.
    """

    def factor(above: np.ndarray, on: np.ndarray) -> jax.Array:
        decayed = jnp.asarray(layers.rate_decay**above * on, jnp.float32)
        if not layers.unfreeze_every:
            return decayed
        updates = step - layers.unfreeze_every * above + 1  # of the layer, including this one
        return decayed * jnp.clip(updates / max(layers.unfreeze_warmup, 1), 0.0, 1.0)

    return jax.tree.map(factor, layers_above(params), trained_mask(layers, params))


def with_layer_rates(
    layers: LayersConfig, chosen: Optimizer, built: optax.GradientTransformationExtraArgs, params: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer with per-layer learning rates, which scale weight decay too; both are zero if frozen.

    The state is that of `built` for all parameters, including frozen ones. It sees the gradients of layers before their
    unfreezing, so that their first updates are not larger than others. `mask_frozen` sets frozen gradients to zero.

    Args:
      chosen: the optimizer of the config.
      built: the transformation that `chosen` built.
      params: arrays or shapes.
    """
    if layers == LayersConfig():
        return built

    def update(updates, state, params=None, *, step, **more):
        now = rate_factors(layers, updates, step)
        passed = {"factors": now} if chosen.takes_factors else {}
        updates, state = built.update(updates, state, params, step=step, **passed, **more)
        scaled = updates if passed else jax.tree.map(jnp.multiply, updates, now)
        return jax.tree.map(lambda u, f: jnp.where(f > 0, u, 0.0), scaled, now), state

    trained_mask(layers, params)
    return optax.GradientTransformationExtraArgs(built.init, update)


def mask_frozen(layers: LayersConfig, gradients: PyTree) -> PyTree:
    """Returns gradients with zeros for frozen parameters, so that global norms exclude them."""
    if layers == LayersConfig():
        return gradients
    return jax.tree.map(lambda g, on: jnp.where(on, g, 0.0), gradients, trained_mask(layers, gradients))
