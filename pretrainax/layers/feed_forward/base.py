"""The base class of feed-forward layers, and the selection of each block's feed-forward layers."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from pretrainax.config import ModelConfig
from pretrainax.layers.rematerialization import recompute, saved_residual
from pretrainax.layers.sums import Sums
from pretrainax.sharding.param_paths import BETWEEN, FIRST, split_layers
from pretrainax.sharding.rules import add_partition_rules


# For bfloat16 inputs, both GELUs compute in float32, with operations that a GPU fuses into one kernel. With erfc (a
# polynomial that is used several times) or tanh, XLA would write an intermediate array to memory in the forward and in
# the backward.
def _gelu(x: jax.Array) -> jax.Array:
    """Computes the exact GELU, x Φ(x) (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2).

    Φ is the cumulative distribution function of the standard normal distribution.
    """
    if x.dtype == jnp.float32:
        return jax.nn.gelu(x, approximate=False)
    x32 = x.astype(jnp.float32)
    return (0.5 * x32 * (1 + jax.lax.erf(x32 * 0.5**0.5))).astype(x.dtype)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    """Computes the tanh approximation of GELU (Hendrycks and Gimpel 2016, section 2).

    For bfloat16, 0.5 (1 + tanh(z)) is computed as sigmoid(2 z), which is equal.
    """
    if x.dtype == jnp.float32:
        return jax.nn.gelu(x, approximate=True)
    x32 = x.astype(jnp.float32)
    return (x32 * jax.nn.sigmoid((8 / math.pi) ** 0.5 * (x32 + 0.044715 * x32**3))).astype(x.dtype)


ACTIVATIONS = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_sigmoid": lambda x: x * jax.nn.sigmoid(1.702 * x),  # Hendrycks and Gimpel 2016, section 2
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def ungated_activation(config: ModelConfig) -> Callable[[jax.Array], jax.Array]:
    """Returns the activation function of a dense feed-forward layer without a gate, which takes `up` [..., F].

    The backward recomputes the output from `up`. Only ReLU saves its output instead, which determines its gradient: on
    a GPU, the matmul then applies ReLU itself, and `up` is not written to memory.
    """
    return _relu if config.activation == "relu" else recompute(ACTIVATIONS[config.activation])


@jax.custom_vjp
def _relu(x: jax.Array) -> jax.Array:
    return jax.nn.relu(x)


def _relu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = saved_residual(jnp.maximum(x, 0))
    return y, y


_relu.defvjp(_relu_forward, lambda y, gradient: (jnp.where(y > 0, gradient, 0),))


def gated_activation(config: ModelConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the activation function of a gated feed-forward layer, which takes (gate, up), [..., F] each.

    The function is activation(gate) · up (Shazeer 2020). With a `gate_limit`, it is activation(min(gate, limit)) ·
    (clip(up, -limit, limit) + 1), as in the released code of gpt-oss.
    """
    activation, limit = ACTIVATIONS[config.activation], config.gate_limit
    if limit is None:
        return recompute(lambda gate, up: activation(gate) * up)
    return recompute(lambda gate, up: activation(jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1))


class FeedForward(nn.Module):
    """The base class of feed-forward layers, [B, T, D] -> [B, T, D].

    A call also returns the layer's losses and metrics as sums. Sums whose names end in "_loss" are added to the
    objective.
    """

    config: ModelConfig

    partition_rules: ClassVar[tuple[tuple[str, str], ...]] = ()  # rows of sharding.rules.PARTITION_RULES

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        """Returns whether the blocks of this model use this class."""
        raise NotImplementedError

    @staticmethod
    def flops(config: ModelConfig, length: int) -> int:
        """Returns the number of floating-point operations in the forward pass for one sequence of `length` tokens."""
        raise NotImplementedError

    def __call__(self, x: jax.Array, real: Optional[jax.Array] = None) -> tuple[jax.Array, Sums]:
        """Returns the output to add to the residual stream, and the sums of losses and metrics.

        Args:
          real: optional [B, T] mask, True at tokens that are not padding. If None, no token is padding.
        """
        raise NotImplementedError


FEED_FORWARDS: list[type[FeedForward]] = []


def register_feed_forward(cls: type[FeedForward]) -> type[FeedForward]:
    """Registers a feed-forward class and its partition rules, and returns the class.

    If several classes match a config, the class registered last is used.
    """
    FEED_FORWARDS.insert(0, cls)
    add_partition_rules(cls.partition_rules)
    return cls


class LayerGroup(NamedTuple):
    """A group of layers of a stack whose parameters have the same shapes and are stacked together."""

    config: ModelConfig  # config of a model that has only layers of this group
    numbers: Sequence[int]  # indices of these layers in the stack, from 0
    part: str = ""  # parameter group that contains their "blocks"; "": the group of the stack itself


def layer_groups(config: ModelConfig, layers: int) -> tuple[LayerGroup, LayerGroup]:
    """Splits a stack's layers into two groups: a mixture-of-experts model's dense layers, and all other layers.

    The first group is empty for dense models and for models with experts in every layer.

    Args:
      layers: number of layers in the stack.
    """
    first, every = (config.experts.first_dense, config.experts.every) if config.experts else (None, None)
    dense, others = split_layers(layers, first or 0, every or 1)
    dense_config = dataclasses.replace(config, experts=None)
    return LayerGroup(dense_config, dense, FIRST if every is None else BETWEEN), LayerGroup(config, others)


class SubLayer(NamedTuple):
    """The name, the class and the config of one of a block's feed-forward layers."""

    name: str  # name of the layer's parameter group
    kind: type[FeedForward]
    config: ModelConfig  # config of a model whose blocks have only this feed-forward layer


def feed_forwards_of(config: ModelConfig) -> list[SubLayer]:
    """Returns the feed-forward layers of a model's blocks, in the order in which a block applies them."""
    configs = [("mlp", config)]
    if config.experts is not None and config.experts.dense_after is not None:
        configs.append(("mlp_after", dataclasses.replace(config, experts=None, d_ff=config.experts.dense_after)))
    return [
        SubLayer(name, next(kind for kind in FEED_FORWARDS if kind.is_in(layer_config)), layer_config)
        for name, layer_config in configs
    ]
