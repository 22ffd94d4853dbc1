"""The feed-forward of a block, a class each kind: what it computes, what it costs, how its parameters are split."""

import functools
from typing import ClassVar

import flax.linen as nn
import jax

from pretrainax.config import ModelConfig
from pretrainax.layers.linear import Linear, normal_init
from pretrainax.layers.made_again import made_again
from pretrainax.layers.sums import Sums
from pretrainax.sharding.rules import add_partition_rules

ACTIVATIONS = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class FeedForward(nn.Module):
    """[B, T, D] -> [B, T, D], and sums that the model's outputs carry: what ends in "_loss" is minimised too."""

    config: ModelConfig

    partition_rules: ClassVar[tuple[tuple[str, str], ...]] = ()  # rows for sharding.rules.PARTITION_RULES

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        """Returns whether the blocks of a model have this kind."""
        raise NotImplementedError

    @staticmethod
    def flops(config: ModelConfig, length: int) -> int:
        """Returns the floating-point operations of one example's forward pass."""
        raise NotImplementedError

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Sums]:
        raise NotImplementedError


FEED_FORWARDS: list[type[FeedForward]] = []


def register_feed_forward(cls: type[FeedForward]) -> type[FeedForward]:
    """Adds a kind, which goes before those that were there, and its rows to the partition rules."""
    FEED_FORWARDS.insert(0, cls)
    add_partition_rules(cls.partition_rules)
    return cls


def feed_forward_of(config: ModelConfig) -> type[FeedForward]:
    """Returns the kind that the blocks of a model have."""
    return next(kind for kind in FEED_FORWARDS if kind.is_in(config))


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

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, Sums]:
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

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, Sums]:
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
