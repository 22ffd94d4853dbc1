"""Defines what every kind of feed-forward has: what it computes, what it costs, how its parameters are split."""

import dataclasses
import functools
from typing import ClassVar, Optional

import flax.linen as nn
import jax

from pretrainax.config import ModelConfig
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

    @staticmethod
    def kept(config: ModelConfig) -> int:
        """Returns how many numbers of a token the backward needs, but for those that are added to the stream."""
        raise NotImplementedError

    def __call__(self, x: jax.Array, real: Optional[jax.Array] = None) -> tuple[jax.Array, Sums]:
        """Returns what is added to the stream; real: [B, T], which tokens are of a text, None: all."""
        raise NotImplementedError


FEED_FORWARDS: list[type[FeedForward]] = []


def register_feed_forward(cls: type[FeedForward]) -> type[FeedForward]:
    """Adds a kind, which goes before those that were there, and its rows to the partition rules."""
    FEED_FORWARDS.insert(0, cls)
    add_partition_rules(cls.partition_rules)
    return cls


def kinds_of_layers(config: ModelConfig, layers: int) -> list[tuple[ModelConfig, int]]:
    """Returns the first of the layers of a stack, as a model without experts where those have none, and the others;
    each with how many they are."""
    first = first_dense(config)
    return [(dataclasses.replace(config, experts=None), first), (config, layers - first)]


def first_dense(config: ModelConfig) -> int:
    """Returns how many of the first layers of a stack have no experts, though the others do."""
    return 0 if config.experts is None else config.experts.first_dense or 0


def feed_forward_of(config: ModelConfig) -> type[FeedForward]:
    """Returns the kind that the blocks of a model have."""
    return next(kind for kind in FEED_FORWARDS if kind.is_in(config))
