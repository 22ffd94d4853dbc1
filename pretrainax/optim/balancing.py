"""Updates the router biases that balance the expert load without an auxiliary loss.

Sources: DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al. 2024, arXiv 2408.15664, algorithm 1. The biases are
parameters: they are saved, averaged and sharded like other parameters, but have neither gradients nor weight decay.
After each update, each bias changes by a fixed amount, whose sign depends on how many tokens its expert received.
"""

from collections.abc import Mapping
from typing import Optional

import jax
import jax.numpy as jnp

from pretrainax.config import LayersConfig, MixtureOfExperts
from pretrainax.layers.by_layer import BY_LAYER, EXPERT_TOKENS
from pretrainax.optim.layers import trained_mask
from pretrainax.optim.matrices import tree_of_names
from pretrainax.sharding.param_paths import PyTree

_BIAS = "/blocks/mlp/router/balance"


def update_balance_biases(
    settings: Optional[MixtureOfExperts], layers: LayersConfig, params: PyTree, sums: Mapping
) -> PyTree:
    """Updates each router bias by ±`bias_rate`, except in frozen layers; returns the new parameters.

    A bias increases if its expert received fewer tokens than the mean over the layer's experts, and decreases if it
    received more. If `settings` or `bias_rate` is None, `params` is returned unchanged.

    Args:
      settings: the config of the experts, or None if the model has none.
      layers: determines which layers are frozen.
      params: the parameters after the optimizer update.
      sums: the update's metric sums, {name: (sum, count)}, which include the token counts of each layer's experts,
        [L, E].
    """
    if settings is None or settings.bias_rate is None:
        return params

    def update_bias(name: str, x: jax.Array, is_trained: jax.Array) -> jax.Array:
        if not name.endswith(_BIAS):
            return x
        stack = name.removesuffix(_BIAS).rpartition("/")[2]
        tokens = next(
            total for key, (total, _) in sums.items() if key.startswith(f"{BY_LAYER}{stack}/") and EXPERT_TOKENS in key
        )
        tokens = tokens.reshape(len(x), -1, x.shape[1]).sum(axis=1)  # of a shared layer: [L, E] -> [1, E]
        return x + settings.bias_rate * jnp.where(
            is_trained, jnp.sign(tokens.mean(axis=-1, keepdims=True) - tokens), 0.0
        )

    return jax.tree.map(update_bias, tree_of_names(params), params, trained_mask(layers, params))
