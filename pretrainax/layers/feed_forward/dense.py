"""The dense feed-forward layer, which uses all its parameters for every token."""

from typing import Optional

import flax.linen as nn
import jax

from pretrainax.config import ModelConfig
from pretrainax.layers.feed_forward.base import FeedForward, gated_activation, register_feed_forward, ungated_activation
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.sums import Sums


@register_feed_forward
class Dense(FeedForward):
    """The dense feed-forward layer: down(activation(up(x))).

    A gated layer computes down(activation(gate(x)) * up(x)) (Shazeer 2020).
    """

    partition_rules = (
        (r"blocks/mlp(_after)?/(shared_)?(up|gate)/kernel", "layers d_model d_ff"),
        (r"blocks/mlp(_after)?/(shared_)?(up|gate)/bias", "layers d_ff"),
        (r"blocks/mlp(_after)?/(shared_)?down/kernel", "layers d_ff d_model"),
        (r"blocks/mlp(_after)?/(shared_)?down/bias", "layers features"),
    )

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return config.experts is None

    @staticmethod
    def flops(config: ModelConfig, length: int) -> int:
        return 2 * length * config.d_model * config.d_ff * (3 if config.gated else 2)

    @nn.compact
    def __call__(self, x: jax.Array, real: Optional[jax.Array] = None) -> tuple[jax.Array, Sums]:
        return dense_feed_forward(self.config, x, self.config.d_ff), {}


def dense_feed_forward(config: ModelConfig, x: jax.Array, width: int, prefix: str = "") -> jax.Array:
    """Applies a feed-forward layer with the hidden size `width` to all tokens, [B, T, D] -> [B, T, D].

    Call this function inside a module; the linear layers become parameters of that module.

    Args:
      prefix: prefix for the names of the linear layers.
    """

    def expand(name: str) -> jax.Array:
        # [B, T, D] -> [B, T, F]
        init = normal_init(config, config.d_model)
        return Linear((width,), ("d_model", "d_ff"), init, config.use_bias, name=f"{prefix}{name}")(x)

    if config.gated:
        hidden = gated_activation(config)(expand("gate"), expand("up"))
    else:
        hidden = ungated_activation(config)(expand("up"))
    # [B, T, F] -> [B, T, D]
    init = normal_init(config, width, residual=True)
    return Linear((config.d_model,), ("d_ff", "d_model"), init, config.use_bias, name=f"{prefix}down")(hidden)
