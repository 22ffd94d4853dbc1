"""Defines what every kind of feed-forward has: what it computes, what it costs, how its parameters are split."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.made_again import made_again
from pretrainax.layers.sums import Sums
from pretrainax.sharding.param_paths import BETWEEN, FIRST, divided
from pretrainax.sharding.rules import add_partition_rules


# Of bfloat16 both are computed in float32, by what a GPU computes at once: of an erfc, which is a polynomial of many
# uses, or a tanh, XLA writes an array in between, forward and backward.
def _gelu(x: jax.Array) -> jax.Array:
    """Returns x Φ(x), of the normal distribution's Φ (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2)."""
    if x.dtype == jnp.float32:
        return jax.nn.gelu(x, approximate=False)
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1 + jax.lax.erf(wide * 0.5**0.5))).astype(x.dtype)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    """Returns nearly that (ibidem): 0.5 (1 + tanh(z)) is sigmoid(2 z)."""
    if x.dtype == jnp.float32:
        return jax.nn.gelu(x, approximate=True)
    wide = x.astype(jnp.float32)
    return (wide * jax.nn.sigmoid((8 / math.pi) ** 0.5 * (wide + 0.044715 * wide**3))).astype(x.dtype)


ACTIVATIONS = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_sigmoid": lambda x: x * jax.nn.sigmoid(1.702 * x),  # Hendrycks and Gimpel 2016, section 2
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def gating(config: ModelConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns what a gated feed-forward makes of (gate, up), each [..., F]: activation(gate) · up (Shazeer 2020), or
    with a `gate_limit` what the released code of gpt-oss does, activation(min(gate, limit)) · (clip(up) + 1)."""
    activation, limit = ACTIVATIONS[config.activation], config.gate_limit
    if limit is None:
        return made_again(lambda gate, up: activation(gate) * up)
    return made_again(lambda gate, up: activation(jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1))


class FeedForward(nn.Module):
    """[B, T, D] -> [B, T, D], and sums that the model's outputs carry: what ends in "_loss" is minimised too."""

    config: ModelConfig

    partition_rules: ClassVar[tuple[tuple[str, str], ...]] = ()  # rows for sharding.rules.PARTITION_RULES

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        """Returns True if the blocks of a model have this kind."""
        raise NotImplementedError

    @staticmethod
    def flops(config: ModelConfig, length: int) -> int:
        """Returns the floating-point operations of one example's forward pass."""
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


class Kind(NamedTuple):
    """Says which layers of a stack have parameters of the same shapes."""

    config: ModelConfig  # of a model of such layers
    numbers: Sequence[int]  # of these layers, of all from 0
    part: str = ""  # of the parameters of the stack, whose "blocks" they are; "": of none


def kinds_of_layers(config: ModelConfig, layers: int) -> tuple[Kind, Kind]:
    """Returns the layers of a stack that have no experts though others have, perhaps none, and those others."""
    first, every = (config.experts.first_dense, config.experts.every) if config.experts else (None, None)
    others, own = divided(layers, first or 0, every or 1)
    plain = dataclasses.replace(config, experts=None)
    return Kind(plain, others, FIRST if every is None else BETWEEN), Kind(config, own)


class Part(NamedTuple):
    """Says what one of the feed-forwards of a block is."""

    name: str  # of its parameters
    kind: type[FeedForward]
    config: ModelConfig  # of a model whose blocks have it alone


def feed_forwards_of(config: ModelConfig) -> list[Part]:
    """Returns the feed-forwards that the blocks of a model have, one after the other."""
    parts = [("mlp", config)]
    if config.experts is not None and config.experts.dense_after is not None:
        parts.append(("mlp_after", dataclasses.replace(config, experts=None, d_ff=config.experts.dense_after)))
    return [Part(name, next(kind for kind in FEED_FORWARDS if kind.is_in(own)), own) for name, own in parts]
