"""Biases that keep experts busy without a loss (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al. 2024, arXiv
2408.15664, algorithm 1).

They are parameters, as they are saved, averaged and sent to devices like others; but no gradient reaches them, and
weight decay leaves biases alone. After an update they follow what the routers gave to each expert in its batch.
"""

from collections.abc import Mapping
from typing import Optional

import jax
import jax.numpy as jnp

from pretrainax.config import LayersConfig, MixtureOfExperts
from pretrainax.layers.by_layer import BY_LAYER, EXPERT_TOKENS
from pretrainax.optim.layers import trained
from pretrainax.optim.matrices import tree_of_names
from pretrainax.sharding.param_paths import PyTree

_BIAS = "/blocks/mlp/router/balance"


def steered(settings: Optional[MixtureOfExperts], layers: LayersConfig, params: PyTree, sums: Mapping) -> PyTree:
    """Returns the parameters after biases have moved by `bias_rate`: up for experts that got fewer tokens than the mean
    of their layer, down for others. Those of frozen layers stay.

    sums: of the update, {name: (sum, count)}; what each expert got, [L, E], is among them.
    """
    if settings is None or settings.bias_rate is None:
        return params

    def moved(name: str, x: jax.Array, on: jax.Array) -> jax.Array:
        if not name.endswith(_BIAS):
            return x
        side = name.removesuffix(_BIAS).rpartition("/")[2]
        tokens = next(
            total for key, (total, _) in sums.items() if key.startswith(f"{BY_LAYER}{side}/") and EXPERT_TOKENS in key
        )
        return x + settings.bias_rate * jnp.where(on, jnp.sign(tokens.mean(axis=-1, keepdims=True) - tokens), 0.0)

    return jax.tree.map(moved, tree_of_names(params), params, trained(layers, params))
