"""A mixture of experts in place of a dense feed-forward layer: each token uses a few of many experts.

Sources: Shazeer et al. 2017; Jiang et al. 2024, arXiv 2401.04088.

On a mesh, each device sends its own tokens to the experts. A device holds some of the experts (mesh axis `expert`;
`exchange` sends tokens to other devices) and a shard of each expert's hidden dimension (mesh axis `tensor`). Parameters
that are sharded along `fsdp` are all-gathered for each layer, like every other matrix.
"""

import functools
from typing import NamedTuple, Optional

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pretrainax.config import ModelConfig
from pretrainax.layers.by_layer import BY_LAYER, DROPPED
from pretrainax.layers.eight_bit import current_products
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
    """The parameters of all the experts' linear layers."""

    up: Maps
    down: Maps
    gate: Optional[Maps] = None  # None: the experts are not gated


@register_feed_forward
class Mixture(FeedForward):
    """A mixture-of-experts layer, which computes the weighted sum of the outputs of each token's experts.

    Shared experts (Dai et al. 2024, arXiv 2401.06066, section 3.2) process every token. They are computed as one wide
    feed-forward layer with weight 1.
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
        matrices = 3 if config.gated else 2
        flops_per_expert = 2 * length * config.d_model * _width(config) * matrices
        experts_per_token = config.experts.top_k + (config.experts.shared_experts or 0)
        return experts_per_token * flops_per_expert + 2 * length * config.d_model * config.experts.num_experts

    @nn.compact
    def __call__(self, x: jax.Array, real: Optional[jax.Array] = None) -> tuple[jax.Array, Sums]:
        config, settings = self.config, self.config.experts
        assert settings is not None
        experts, width, hidden_size = settings.num_experts, config.d_model, _width(config)
        routing, sums = Router(config, name="router")(x, real)
        up_or_gate = functools.partial(
            ExpertMaps, (experts, width, hidden_size), normal_init(config, width), config.use_bias
        )
        init = normal_init(config, hidden_size, residual=True)
        down = ExpertMaps((experts, hidden_size, width), init, config.use_bias, name="experts_down")
        gate = up_or_gate(name="experts_gate")() if config.gated else None
        kernels = Kernels(up_or_gate(name="experts_up")(), down(), gate)
        real = jnp.ones(x.shape[:2], jnp.bool_) if real is None else real
        y, dropped, assigned = _on_each_device(config, x.shape)(x, real, routing, kernels)
        if settings.capacity is not None:
            sums[f"{BY_LAYER}{DROPPED}"] = (dropped, assigned)
        if settings.shared_experts:
            y += dense_feed_forward(config, x, settings.shared_experts * hidden_size, "shared_")
        return y, sums


class ExpertMaps(nn.Module):
    """Holds the float32 parameters of one linear layer of every expert."""

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
    """Describes the experts' capacity and, if they have none, how their matmuls are computed.

    The matmuls depend on the platform of the current mesh (`jax.set_mesh`).
    """
    assert config.experts is not None
    if (capacity := config.experts.capacity) is not None:
        return f"each has room for {capacity:g} times an even share; further tokens are dropped"
    method = {"tpu": "ragged_dot", "cpu": "blocks of rows"}.get(platform(), "a Triton kernel")
    return f"no token is dropped; products use {method}"


def _width(config: ModelConfig) -> int:
    """Returns the hidden size of one expert."""
    assert config.experts is not None
    return config.experts.d_ff or config.d_ff


def _on_each_device(config: ModelConfig, shape: tuple[int, ...]):
    """Returns a function that computes the experts on each device, for the tokens of that device.

    The function maps (x, real, routing, kernels) to (y, number of dropped assignments, number of assignments) and runs
    under the current mesh (`jax.set_mesh`). If the rows cannot be split evenly, every device computes all rows.

    Args:
      shape: the shape of x.
    """
    run = functools.partial(_mix_experts, config)
    if jax.sharding.get_abstract_mesh().size in (0, 1):  # no mesh, or a single device
        return run
    bias_specs = [logical_spec("experts", name) if config.use_bias else None for name in ("d_ff", "features")]
    up_spec = Maps(logical_spec("experts", "d_model", "d_ff"), bias_specs[0])
    down_spec = Maps(logical_spec("experts", "d_ff", "d_model"), bias_specs[1])
    tokens = batch_spec(shape) or P()

    def on_device(*arguments):
        y, *counts = run(*arguments)
        return y, *(jax.lax.psum(count, TOKEN_AXES) for count in counts)

    return jax.shard_map(
        on_device,
        in_specs=(
            *(tokens, tokens, Routing(tokens, tokens)),
            Kernels(up_spec, down_spec, up_spec if config.gated else None),
        ),
        out_specs=(tokens, P(), P()),
        check_vma=False,  # the backward of expert_product does not declare which axes its results vary over
    )


def _mix_experts(
    config: ModelConfig, x: jax.Array, real: jax.Array, routing: Routing, kernels: Kernels
) -> tuple[jax.Array, ...]:
    """Computes the output of the experts for the tokens x [b, t, D] of one device.

    Args:
      real: [b, t] mask, False at padding, whose output is 0.

    Returns:
      The output [b, t, D], the number of dropped assignments, and the number of assignments, without padding.
    """
    settings = config.experts
    assert settings is not None
    # [b, t, D] -> [N, D], [b, t, k] -> [N, k]
    rows, (experts, weights) = x.reshape(-1, x.shape[-1]), (a.reshape(-1, settings.top_k) for a in routing)
    capacity = None
    if settings.capacity is not None:
        capacity = min(slots_per_expert(settings.capacity, experts.size, settings.num_experts), len(rows))
    slots = assign(experts, settings.num_experts, capacity, real.reshape(-1))
    y = from_slots(_run_experts(config, to_slots(rows, slots), kernels, slots, capacity), slots, weights)
    if axis_size(TENSOR_AXIS) > 1:
        y = jax.lax.psum(y, TENSOR_AXIS)
    dropped = jnp.zeros(()) if capacity is None else jnp.maximum(slots.sizes - capacity, 0).sum().astype(jnp.float32)
    return y.astype(x.dtype).reshape(x.shape), dropped, slots.sizes.sum().astype(jnp.float32)


def _run_experts(
    config: ModelConfig, rows: jax.Array, kernels: Kernels, slots: Slots, capacity: Optional[int]
) -> jax.Array:
    """Computes the output of the experts for the rows [S, D] of one device.

    If devices hold different experts, they exchange rows.

    Args:
      capacity: number of rows of each expert, if it is fixed. If None, the numbers are in `slots.sizes`.
    """
    if axis_size(EXPERT_AXIS) == 1:
        return _feed_forward(config, rows, kernels, slots.sizes, capacity)
    exchange = Exchange(slots.sizes, len(rows), capacity)
    return exchange.combine(_feed_forward(config, exchange.dispatch(rows), kernels, exchange.sizes, exchange.capacity))


def _feed_forward(
    config: ModelConfig, rows: jax.Array, kernels: Kernels, sizes: jax.Array, capacity: Optional[int]
) -> jax.Array:
    """Applies the feed-forward layer of each row's expert to the rows, [S, D] -> [S, D].

    Args:
      sizes: [E], number of rows per expert.
      capacity: number of rows of each expert, if it is fixed. If None, the numbers are in `sizes`.
    """
    up_layout, down_layout = (Layout(capacity, split, current_products()) for split in (1, 2))
    up = _expert_linear(up_layout, rows, kernels.up, sizes)
    if kernels.gate is None:
        hidden = recompute(ACTIVATIONS[config.activation])(up)
    else:
        hidden = gated_activation(config)(_expert_linear(up_layout, rows, kernels.gate, sizes), up)
    return _expert_linear(down_layout, hidden, kernels.down, sizes)


def _expert_linear(layout: Layout, rows: jax.Array, layer: Maps, sizes: jax.Array) -> jax.Array:
    """Applies the linear layer (kernel and bias) of each row's expert to the rows, [S, D] -> [S, F]."""
    y = expert_product(layout, rows, layer.kernel, sizes)
    if layer.bias is None:
        return y
    bias = layer.bias.astype(y.dtype)
    if layout.split == 2:  # the sum over devices along `tensor` contains the bias once per device
        bias /= axis_size(TENSOR_AXIS)
    if layout.capacity is not None:
        # [S, F] -> [E, S/E, F] -> [S, F]
        return (y.reshape(len(bias), -1, y.shape[1]) + bias[:, None]).reshape(y.shape)
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(y)), side="right")
    # The bias is selected by a matmul, so that the gradient is not a scatter. Rows without an expert get 0.
    return y + jax.nn.one_hot(expert, len(bias), dtype=y.dtype) @ bias
