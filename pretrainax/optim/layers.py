"""Implements per-layer learning rates: frozen layers, layer-wise learning-rate decay, and gradual unfreezing.

Each parameter in a stack of layers is a single array [L, …], so per-layer values for it have shape [L, 1, …].
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

# Parameters outside of stacks that are below the first block or shared by all blocks: embeddings, their norms and
# projections, position biases, the input convolution. All other parameters outside of stacks are above the last block.
_BELOW = re.compile(r"(^|/)((\w+_)?embedding(_\w+)?|relative_bias|convolution)/")
_HEAD_WITH_BLOCKS = "multi_token/"  # its blocks are above the last block, as all heads are


def layers_above(params: PyTree) -> PyTree:
    """Returns the number of layers above each parameter, where the heads count as one layer above the last block.

    The number is 0 for the heads, 1 for the last block, and L + 1 for the embeddings. Parameters of the model's blocks
    get an array [L, 1, …] with one number per block; all other parameters get a scalar.

    Args:
      params: arrays or shapes.

    NOTE ELECTRA's code (model/optimization.py) counts one more layer above all parameters except the heads.
    """
    stacks = layer_indices(params)
    max_layers = max((total for _, total in stacks.values()), default=0)

    def count_above(name: str, x: PyTree) -> np.ndarray:
        if name.startswith(_HEAD_WITH_BLOCKS):
            return np.array(0)
        if stack := stack_of(name):
            indices, total = stacks[stack]
            return _per_layer_array([total - i for i in indices], x)
        return np.array(max_layers + 1 if _BELOW.search(name) else 0)

    return jax.tree.map(count_above, tree_of_names(params), params)


def _per_layer_array(values: Sequence, x: PyTree) -> np.ndarray:
    # [L] -> [L, 1, …], with the rank of `x`
    return np.array(values).reshape(-1, *[1] * (len(x.shape) - 1))


def trained_mask(layers: LayersConfig, params: PyTree) -> PyTree:
    """Returns a mask of `params`, which is True for trained parameters and False for frozen parameters.

    A stacked parameter gets an array [L, 1, …] with one value per block; any other parameter gets a scalar.

    Args:
      params: arrays or shapes.

    Raises:
      UserError: no parameter is trained.
    """
    stacks = layer_indices(params)

    def is_trained(name: str, x: PyTree) -> np.ndarray:
        if name.startswith(_HEAD_WITH_BLOCKS):
            return np.array(True)
        if stack := stack_of(name):
            return _per_layer_array([i >= layers.frozen for i in stacks[stack][0]], x)
        return np.array(not (layers.frozen_embeddings and _BELOW.search(name)))

    flags = jax.tree.map(is_trained, tree_of_names(params), params)
    if not any(map(np.any, jax.tree.leaves(flags))):
        raise UserError(f"config.layers leaves no parameter to train: {layers.describe()}")
    return flags


def count_trained(layers: LayersConfig, params: PyTree) -> int:
    """Counts the array elements in `params` (arrays or shapes) that are trained."""
    counts = jax.tree.map(
        lambda mask, x: int(mask.sum()) * math.prod(x.shape) // mask.size, trained_mask(layers, params), params
    )
    return sum(jax.tree.leaves(counts))


def rate_factors(layers: LayersConfig, params: PyTree, step: jax.typing.ArrayLike) -> PyTree:
    """Computes the factor by which each parameter's learning rate is multiplied.

    A stacked parameter gets an array [L, 1, …] with one factor per block; any other parameter gets a scalar. The factor
    of a layer with n layers above it is rate_decay^n, or 0 if the layer is frozen. With gradual unfreezing, the factor
    is 0 before step n · unfreeze_every, and then grows linearly over `unfreeze_warmup` steps to rate_decay^n.

    Args:
      params: arrays or shapes.
      step: number of completed updates, which is 0 at the first update.
    """

    def factor(above: np.ndarray, mask: np.ndarray) -> jax.Array:
        decayed = jnp.asarray(layers.rate_decay**above * mask, jnp.float32)
        if not layers.unfreeze_every:
            return decayed
        updates = step - layers.unfreeze_every * above + 1  # number of updates of the layer, including this update
        return decayed * jnp.clip(updates / max(layers.unfreeze_warmup, 1), 0.0, 1.0)

    return jax.tree.map(factor, layers_above(params), trained_mask(layers, params))


def with_layer_rates(
    layers: LayersConfig, chosen: Optimizer, built: optax.GradientTransformationExtraArgs, params: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Adds per-layer learning rates to an optimizer: the factors of `rate_factors` scale updates and weight decay.

    The result has the same optimizer state as `built`, for all parameters including frozen ones. With gradual
    unfreezing, a layer's moments already include its gradients when it is unfrozen, so its first updates are not larger
    than later ones. `mask_frozen` sets the gradients of frozen parameters to zero.

    Args:
      layers: the layer-wise settings. With default settings, `built` is returned.
      chosen: the config's optimizer.
      built: the transformation that `chosen.build` returned.
      params: arrays or shapes.

    Raises:
      UserError: no parameter is trained.
    """
    if layers == LayersConfig():
        return built

    def update(updates, state, params=None, *, step, **extra_args):
        factors = rate_factors(layers, updates, step)
        factor_args = {"factors": factors} if chosen.takes_factors else {}
        updates, state = built.update(updates, state, params, step=step, **factor_args, **extra_args)
        scaled = updates if factor_args else jax.tree.map(jnp.multiply, updates, factors)
        return jax.tree.map(lambda u, f: jnp.where(f > 0, u, 0.0), scaled, factors), state

    trained_mask(layers, params)
    return optax.GradientTransformationExtraArgs(built.init, update)


def mask_frozen(layers: LayersConfig, gradients: PyTree) -> PyTree:
    """Sets the gradients of frozen parameters to zero, which also excludes them from the global gradient norm."""
    if layers == LayersConfig():
        return gradients
    return jax.tree.map(lambda g, mask: jnp.where(mask, g, 0.0), gradients, trained_mask(layers, gradients))
