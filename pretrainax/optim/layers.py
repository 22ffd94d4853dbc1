"""Implements per-layer learning rates: frozen layers, layer-wise decay of the rate, and gradual unfreezing.

Each parameter of a stack of layers is one array [L, …], so its per-layer values are an array [L, 1, …].
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

# Outside of stacks, these paths are below the first block or shared by all blocks: embeddings, their norms and
# projections, position biases, the input convolution. All other paths outside of stacks are above the last block.
_BELOW = re.compile(r"(^|/)((\w+_)?embedding(_\w+)?|relative_bias|convolution)/")


def layers_above(params: PyTree) -> PyTree:
    """Returns the number of layers above each parameter; the heads count as one layer above the last block.

    The number is 0 for parameters of heads, 1 for the last block, and L + 1 for embeddings. Stacked parameters get an
    array [L, 1, …], with one number per block; other parameters get a scalar [].

    Args:
      params: arrays or shapes.

    NOTE ELECTRA's code (model/optimization.py) counts one more layer above all parameters except those of the heads.
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
    """Returns True for each trained parameter and False for each frozen parameter, in the shapes of `layers_above`.

    Args:
      params: arrays or shapes.

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
    """Returns the number of scalar parameters that are trained; `params` are arrays or shapes."""
    shares = jax.tree.map(
        lambda on, x: int(on.sum()) * math.prod(x.shape) // on.size, trained_mask(layers, params), params
    )
    return sum(jax.tree.leaves(shares))


def rate_factors(layers: LayersConfig, params: PyTree, step: jax.typing.ArrayLike) -> PyTree:
    """Returns the factor by which each parameter's learning rate is multiplied, in the shapes of `layers_above`.

    The factor is rate_decay^layers_above, and 0 for frozen parameters. With gradual unfreezing, the factor of a layer
    with n layers above it is 0 before step n · unfreeze_every, and then grows linearly over `unfreeze_warmup` steps.

    Args:
      params: arrays or shapes.
      step: number of completed updates; 0 at the first update.
    """

    def factor(above: np.ndarray, on: np.ndarray) -> jax.Array:
        decayed = jnp.asarray(layers.rate_decay**above * on, jnp.float32)
        if not layers.unfreeze_every:
            return decayed
        updates = step - layers.unfreeze_every * above + 1  # number of updates of the layer, including this update
        return decayed * jnp.clip(updates / max(layers.unfreeze_warmup, 1), 0.0, 1.0)

    return jax.tree.map(factor, layers_above(params), trained_mask(layers, params))


def with_layer_rates(
    layers: LayersConfig, chosen: Optimizer, built: optax.GradientTransformationExtraArgs, params: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer with per-layer learning rates; the factors of `rate_factors` scale updates and weight decay.

    The optimizer state is that of `built` and covers all parameters, including frozen parameters. With gradual
    unfreezing, the state includes gradients from before a layer is unfrozen, so the first updates of this layer are not
    larger than its later updates. `mask_frozen` sets the gradients of frozen parameters to zero.

    Args:
      chosen: the optimizer of the config.
      built: the transformation that `chosen.build` returned.
      params: arrays or shapes.

    Raises:
      UserError: no parameter is trained.
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
    """Returns the gradients with zeros for frozen parameters, so that the global gradient norm excludes them."""
    if layers == LayersConfig():
        return gradients
    return jax.tree.map(lambda g, on: jnp.where(on, g, 0.0), gradients, trained_mask(layers, gradients))
