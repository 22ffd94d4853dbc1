"""The feed-forward of a block, plain or gated."""

import functools

import flax.linen as nn
import jax

from pretrainax.config import ModelConfig
from pretrainax.layers.linear import Linear, normal_init

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class MLP(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        activation = ACTIVATIONS[config.activation]

        def widen(name):  # [B, T, D] -> [B, T, F]
            init = normal_init(config, config.d_model)
            return Linear((config.d_ff,), ("d_model", "d_ff"), init, config.use_bias, name=name)(x)

        hidden = activation(widen("gate")) * widen("up") if config.gated else activation(widen("up"))
        init = normal_init(config, config.d_ff, residual=True)
        # [B, T, F] -> [B, T, D]
        return Linear((config.d_model,), ("d_ff", "d_model"), init, config.use_bias, name="down")(hidden)
