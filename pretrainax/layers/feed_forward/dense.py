"""The feed-forwards that every token passes through."""

from typing import Optional

import flax.linen as nn
import jax

from pretrainax.config import ModelConfig
from pretrainax.layers.feed_forward.base import ACTIVATIONS, FeedForward, register_feed_forward
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.made_again import made_again
from pretrainax.layers.sums import Sums


@register_feed_forward
class Plain(FeedForward):
    """down(activation(up(x)))."""

    partition_rules = (
        (r"blocks/mlp/up/kernel", "layers d_model d_ff"),
        (r"blocks/mlp/up/bias", "layers d_ff"),
        (r"blocks/mlp/down/kernel", "layers d_ff d_model"),
        (r"blocks/mlp/down/bias", "layers features"),
    )

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return not config.gated

    @staticmethod
    def flops(config: ModelConfig, length: int) -> int:
        return 2 * length * config.d_model * config.d_ff * 2

    @staticmethod
    def kept(config: ModelConfig) -> int:
        return config.d_ff

    @nn.compact
    def __call__(self, x: jax.Array, real: Optional[jax.Array] = None) -> tuple[jax.Array, Sums]:
        config = self.config
        return _down(config, made_again(ACTIVATIONS[config.activation])(_widened(config, x, "up"))), {}


@register_feed_forward
class Gated(FeedForward):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    partition_rules = (
        (r"blocks/mlp/gate/kernel", "layers d_model d_ff"),
        (r"blocks/mlp/gate/bias", "layers d_ff"),
    )  # the others are those of Plain

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return config.gated

    @staticmethod
    def flops(config: ModelConfig, length: int) -> int:
        return 2 * length * config.d_model * config.d_ff * 3

    @staticmethod
    def kept(config: ModelConfig) -> int:
        return 2 * config.d_ff

    @nn.compact
    def __call__(self, x: jax.Array, real: Optional[jax.Array] = None) -> tuple[jax.Array, Sums]:
        config = self.config
        activation = ACTIVATIONS[config.activation]
        gated = made_again(lambda gate, up: activation(gate) * up)
        return _down(config, gated(_widened(config, x, "gate"), _widened(config, x, "up"))), {}


def _widened(config: ModelConfig, x: jax.Array, name: str) -> jax.Array:
    # [B, T, D] -> [B, T, F]
    init = normal_init(config, config.d_model)
    return Linear((config.d_ff,), ("d_model", "d_ff"), init, config.use_bias, name=name)(x)


def _down(config: ModelConfig, hidden: jax.Array) -> jax.Array:
    # [B, T, F] -> [B, T, D]
    init = normal_init(config, config.d_ff, residual=True)
    return Linear((config.d_model,), ("d_ff", "d_model"), init, config.use_bias, name="down")(hidden)
