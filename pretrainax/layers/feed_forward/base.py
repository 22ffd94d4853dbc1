"""The interface of feed-forward layers, and the choice of the feed-forward of each layer."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.rematerialization import recompute
from pretrainax.layers.sums import Sums
from pretrainax.sharding.param_paths import BETWEEN, FIRST, split_layers
from pretrainax.sharding.rules import add_partition_rules


# For bfloat16, both GELUs use float32 and operations that a GPU computes in one kernel. For an erfc, which is a
# polynomial with many uses, or a tanh, XLA writes an intermediate array in the forward and in the backward.
def _gelu(x: jax.Array) -> jax.Array:
    """Computes x Φ(x), with Φ of the normal distribution (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2)."""
    if x.dtype == jnp.float32:
        return jax.nn.gelu(x, approximate=False)
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1 + jax.lax.erf(wide * 0.5**0.5))).astype(x.dtype)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    """Computes the tanh approximation of GELU (ibidem); 0.5 (1 + tanh(z)) is sigmoid(2 z)."""
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


def gated_activation(config: ModelConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the function of (gate, up), each [..., F], that a gated feed-forward computes.

    It is activation(gate) · up (Shazeer 2020). With a `gate_limit` it is activation(min(gate, limit)) · (clip(up) + 1),
    as in the released code of gpt-oss.
    """
    activation, limit = ACTIVATIONS[config.activation], config.gate_limit
    if limit is None:
        return recompute(lambda gate, up: activation(gate) * up)
    return recompute(lambda gate, up: activation(jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1))


class FeedForward(nn.Module):
    """A feed-forward layer, [B, T, D] -> [B, T, D], and sums for the model's outputs.

    Sums whose names end in "_loss" are minimised too.
    """

    config: ModelConfig

    partition_rules: ClassVar[tuple[tuple[str, str], ...]] = ()  # rows for sharding.rules.PARTITION_RULES

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        """Returns True if the blocks of a model use this class."""
        raise NotImplementedError

    @staticmethod
    def flops(config: ModelConfig, length: int) -> int:
        """Returns the floating-point operations of one example's forward pass."""
        raise NotImplementedError

    def __call__(self, x: jax.Array, real: Optional[jax.Array] = None) -> tuple[jax.Array, Sums]:
        """Returns the update of the residual stream, and the sums.

        Args:
          real: [B, T], True at tokens that are not padding; None: all tokens.
        """
        raise NotImplementedError


FEED_FORWARDS: list[type[FeedForward]] = []


def register_feed_forward(cls: type[FeedForward]) -> type[FeedForward]:
    """Registers a class, with precedence over earlier classes, and its partition rules."""
    FEED_FORWARDS.insert(0, cls)
    add_partition_rules(cls.partition_rules)
    return cls


class LayerGroup(NamedTuple):
    """The layers of a stack whose parameters have the same shapes."""

    config: ModelConfig  # of a model with only these layers
    numbers: Sequence[int]  # indices of these layers in the stack, from 0
    part: str = ""  # name of the parameter group that has their "blocks"; "": the stack itself


def layer_groups(config: ModelConfig, layers: int) -> tuple[LayerGroup, LayerGroup]:
    """Returns the dense layers of a stack that has experts in other layers (often none), and all other layers."""
    first, every = (config.experts.first_dense, config.experts.every) if config.experts else (None, None)
    dense, others = split_layers(layers, first or 0, every or 1)
    plain = dataclasses.replace(config, experts=None)
    return LayerGroup(plain, dense, FIRST if every is None else BETWEEN), LayerGroup(config, others)


class SubLayer(NamedTuple):
    """One of the feed-forwards of a block."""

    name: str  # of its parameter group
    kind: type[FeedForward]
    config: ModelConfig  # of a model whose blocks have only this feed-forward


def feed_forwards_of(config: ModelConfig) -> list[SubLayer]:
    """Returns the feed-forwards of a model's blocks, in order."""
    parts = [("mlp", config)]
    if config.experts is not None and config.experts.dense_after is not None:
        parts.append(("mlp_after", dataclasses.replace(config, experts=None, d_ff=config.experts.dense_after)))
    return [SubLayer(name, next(kind for kind in FEED_FORWARDS if kind.is_in(own)), own) for name, own in parts]
