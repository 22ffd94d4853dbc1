"""Updates the router biases that balance the load of experts without an auxiliary loss.

Sources: DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al. 2024, arXiv 2408.15664, algorithm 1. The biases are
parameters, so they are saved, averaged and sharded like other parameters, but they have neither gradients nor weight
decay. After each update, each bias changes by a fixed amount. The number of tokens of its expert determines the sign.
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
    """Returns the parameters with router biases changed by ±`bias_rate`, except the biases of frozen layers.

    A bias increases if its expert received fewer tokens than the mean expert of the layer, and decreases if the expert
    received more. The parameters are unchanged if `settings` or `bias_rate` is None.

    Args:
      sums: {name: (sum, count)}, the sums of the update's metrics. They include the number of tokens of each expert in
        each layer, [L, E].
    """
    if settings is None or settings.bias_rate is None:
        return params

    def moved(name: str, x: jax.Array, on: jax.Array) -> jax.Array:
        if not name.endswith(_BIAS):
            return x
        stack = name.removesuffix(_BIAS).rpartition("/")[2]
        tokens = next(
            total for key, (total, _) in sums.items() if key.startswith(f"{BY_LAYER}{stack}/") and EXPERT_TOKENS in key
        )
        return x + settings.bias_rate * jnp.where(on, jnp.sign(tokens.mean(axis=-1, keepdims=True) - tokens), 0.0)

    return jax.tree.map(moved, tree_of_names(params), params, trained_mask(layers, params))
