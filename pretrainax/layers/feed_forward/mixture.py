"""A mixture of experts in place of a feed-forward: each token uses a few of many experts.

Sources: Shazeer et al. 2017; Jiang et al. 2024, arXiv 2401.04088.

On a mesh, each device sends its own tokens to the experts. A device has some of the experts (mesh axis `expert`;
`exchange` sends tokens to other devices) and a part of the hidden size of each expert (mesh axis `tensor`). Parameters
that `fsdp` splits are gathered for each layer, like every other matrix.
"""

import functools
from typing import NamedTuple, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.config import ModelConfig
from pretrainax.layers.by_layer import BY_LAYER, DROPPED
from pretrainax.layers.feed_forward.base import ACTIVATIONS, FeedForward, gated_activation, register_feed_forward
from pretrainax.layers.feed_forward.dense import dense_feed_forward
from pretrainax.layers.feed_forward.exchange import Exchange
from pretrainax.layers.feed_forward.products import Layout, expert_product
from pretrainax.layers.feed_forward.router import Router, Routing
from pretrainax.layers.feed_forward.slots import Slots, assign, from_slots, slots_per_expert, to_slots
from pretrainax.layers.linear import normal_init
from pretrainax.layers.rematerialization import recompute
from pretrainax.layers.sums import Sums
from pretrainax.sharding.arrays import batch_spec
from pretrainax.sharding.axes import EXPERT_AXIS, TENSOR_AXIS, TOKEN_AXES, logical_spec
from pretrainax.sharding.mesh import axis_size, platform


class Maps(NamedTuple):
    """The parameters of one linear layer of every expert."""

    kernel: jax.Array  # [E, D, F]
    bias: Optional[jax.Array]  # [E, F]; None: no bias


class Kernels(NamedTuple):
    """The parameters of all linear layers of the experts."""

    up: Maps
    down: Maps
    gate: Optional[Maps] = None  # None: the feed-forward is not gated


@register_feed_forward
class Mixture(FeedForward):
    """The mixture of experts: the sum of weight · feed-forward over the experts of a token.

    Shared experts (Dai et al. 2024, arXiv 2401.06066, section 3.2) process every token. They are computed as one wide
    feed-forward with weight 1.
    """

    partition_rules = (
        (r"blocks/mlp/router/kernel", "layers d_model features"),
        (r"blocks/mlp/router/(bias|balance)", "layers features"),
        (r"blocks/mlp/experts_(up|gate)/kernel", "layers experts d_model d_ff"),
        (r"blocks/mlp/experts_(up|gate)/bias", "layers experts d_ff"),
        (r"blocks/mlp/experts_down/kernel", "layers experts d_ff d_model"),
        (r"blocks/mlp/experts_down/bias", "layers experts features"),
    )

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return config.experts is not None

    @staticmethod
    def flops(config: ModelConfig, length: int) -> int:
        assert config.experts is not None
        maps = 3 if config.gated else 2
        expert = 2 * length * config.d_model * _width(config) * maps
        passed = config.experts.top_k + (config.experts.shared_experts or 0)
        return passed * expert + 2 * length * config.d_model * config.experts.num_experts

    @nn.compact
    def __call__(self, x: jax.Array, real: Optional[jax.Array] = None) -> tuple[jax.Array, Sums]:
        config, settings = self.config, self.config.experts
        assert settings is not None
        experts, outer, inner = settings.num_experts, config.d_model, _width(config)
        routing, sums = Router(config, name="router")(x, real)
        wide = functools.partial(ExpertMaps, (experts, outer, inner), normal_init(config, outer), config.use_bias)
        init = normal_init(config, inner, residual=True)
        down = ExpertMaps((experts, inner, outer), init, config.use_bias, name="experts_down")
        gate = wide(name="experts_gate")() if config.gated else None
        kernels = Kernels(wide(name="experts_up")(), down(), gate)
        y, dropped, assigned = _on_each_device(config, x.shape)(x, routing, kernels)
        if settings.capacity is not None:
            sums[f"{BY_LAYER}{DROPPED}"] = (dropped, assigned)
        if settings.shared_experts:
            y += dense_feed_forward(config, x, settings.shared_experts * inner, "shared_")
        return y, sums


class ExpertMaps(nn.Module):
    """The parameters of one linear layer for each expert, in float32."""

    shape: tuple[int, int, int]  # [E, D, F]
    kernel_init: jax.nn.initializers.Initializer
    use_bias: bool

    @nn.compact
    def __call__(self) -> Maps:
        experts, _, outputs = self.shape
        kernel, bias = self.param("kernel", self.kernel_init, self.shape, jnp.float32), None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (experts, outputs), jnp.float32)
        return Maps(kernel, bias)


def describe_routing(config: ModelConfig) -> str:
    """Returns a description of the experts' capacity or of their matrix products, on the platform of `jax.set_mesh`."""
    assert config.experts is not None
    if (capacity := config.experts.capacity) is not None:
        return f"each has room for {capacity:g} times an even share; further tokens are dropped"
    by = {"tpu": "ragged_dot", "cpu": "blocks of rows"}.get(platform(), "a Triton kernel")
    return f"no token is dropped; products use {by}"


def _width(config: ModelConfig) -> int:
    """Returns the hidden size of one expert."""
    assert config.experts is not None
    return config.experts.d_ff or config.d_ff


def _on_each_device(config: ModelConfig, shape: tuple[int, ...]):
    """Returns the function (x, routing, kernels) -> (y, number of dropped assignments, number of assignments).

    The function runs under the mesh of `jax.set_mesh`. If the mesh does not divide the rows, every device computes all
    rows.

    Args:
      shape: the shape of x.
    """
    run = functools.partial(_mixed, config)
    if jax.sharding.get_abstract_mesh().size in (0, 1):  # no mesh, or a single device
        return run
    bias_specs = [logical_spec("experts", name) if config.use_bias else None for name in ("d_ff", "features")]
    wide = Maps(logical_spec("experts", "d_model", "d_ff"), bias_specs[0])
    down = Maps(logical_spec("experts", "d_ff", "d_model"), bias_specs[1])
    tokens = batch_spec(shape) or P()

    def on_device(x, routing, kernels):
        y, *counts = run(x, routing, kernels)
        return y, *(jax.lax.psum(count, TOKEN_AXES) for count in counts)

    return jax.shard_map(
        on_device,
        in_specs=(tokens, Routing(tokens, tokens), Kernels(wide, down, wide if config.gated else None)),
        out_specs=(tokens, P(), P()),
        check_vma=False,  # the backward of expert_product does not declare which axes its results vary over
    )


def _mixed(config: ModelConfig, x: jax.Array, routing: Routing, kernels: Kernels) -> tuple[jax.Array, ...]:
    """Computes the output of the experts for the tokens x [b, t, D] of one device.

    Returns:
      The output [b, t, D], the number of dropped assignments, and the number of assignments.
    """
    settings = config.experts
    assert settings is not None
    # [b, t, D] -> [N, D], [b, t, k] -> [N, k]
    rows, (experts, weights) = x.reshape(-1, x.shape[-1]), (a.reshape(-1, settings.top_k) for a in routing)
    room = None
    if settings.capacity is not None:
        room = min(slots_per_expert(settings.capacity, experts.size, settings.num_experts), len(rows))
    slots = assign(experts, settings.num_experts, room)
    y = from_slots(_by_experts(config, to_slots(rows, slots), kernels, slots, room), slots, weights)
    if axis_size(TENSOR_AXIS) > 1:
        y = jax.lax.psum(y, TENSOR_AXIS)
    dropped = jnp.zeros(()) if room is None else jnp.maximum(slots.sizes - room, 0).sum().astype(jnp.float32)
    return y.astype(x.dtype).reshape(x.shape), dropped, jnp.float32(experts.size)


def _by_experts(config: ModelConfig, rows: jax.Array, kernels: Kernels, slots: Slots, room: Optional[int]) -> jax.Array:
    """Computes the output of the experts for the rows [S, D] of one device.

    If devices have different experts, they exchange rows.

    Args:
      room: fixed number of rows per expert; None: `slots.sizes` contains the numbers.
    """
    if axis_size(EXPERT_AXIS) == 1:
        return _feed_forward(config, rows, kernels, slots.sizes, room)
    exchange = Exchange(slots.sizes, len(rows), room)
    return exchange.combine(_feed_forward(config, exchange.dispatch(rows), kernels, exchange.sizes, exchange.capacity))


def _feed_forward(
    config: ModelConfig, rows: jax.Array, kernels: Kernels, sizes: jax.Array, room: Optional[int]
) -> jax.Array:
    """Applies the feed-forward of each row's expert to the rows, [S, D] -> [S, D].

    Args:
      sizes: [E], number of rows per expert.
      room: fixed number of rows per expert; None: an expert has as many rows as `sizes` states.
    """
    wide, narrow = Layout(room, split=1), Layout(room, split=2)
    up = _mapped(wide, rows, kernels.up, sizes)
    if kernels.gate is None:
        hidden = recompute(ACTIVATIONS[config.activation])(up)
    else:
        hidden = gated_activation(config)(_mapped(wide, rows, kernels.gate, sizes), up)
    return _mapped(narrow, hidden, kernels.down, sizes)


def _mapped(layout: Layout, rows: jax.Array, maps: Maps, sizes: jax.Array) -> jax.Array:
    """Applies the linear layer (kernel and bias) of each row's expert to the rows, [S, D] -> [S, F]."""
    y = expert_product(layout, rows, maps.kernel, sizes)
    if maps.bias is None:
        return y
    bias = maps.bias.astype(y.dtype)
    if layout.split == 2:  # the results of devices along `tensor` are summed, and each contains the bias
        bias /= axis_size(TENSOR_AXIS)
    if layout.capacity is not None:
        # [S, F] -> [E, S/E, F] -> [S, F]
        return (y.reshape(len(bias), -1, y.shape[1]) + bias[:, None]).reshape(y.shape)
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(y)), side="right")
    # The bias is selected by a product, so that the gradient is not a scatter. Rows without an expert get 0.
    return y + jax.nn.one_hot(expert, len(bias), dtype=y.dtype) @ bias
