"""Compares a stack that alternates layers without and with experts with the same layers in sequence."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import MixtureOfExperts, ModelConfig, RotaryPositions
from pretrainax.layers.block import AuxOutputs, Block
from pretrainax.layers.compute import Compute
from pretrainax.layers.feed_forward import layer_groups
from pretrainax.layers.stack import Stack
from pretrainax.models.outputs import hidden_states
from pretrainax.sharding.param_paths import layer_indices, parameter_names
from tests.support.tiers import few

MODEL = ModelConfig(num_layers=4, d_model=16, d_ff=32, num_heads=4, position=RotaryPositions(), dropout_rate=0.2)
X = jax.random.normal(jax.random.key(5), (2, 6, 16))
POSITIONS = jnp.tile(jnp.arange(6), (2, 1))
SEGMENTS = jnp.ones((2, 6), jnp.int32)
EVERY = pytest.mark.parametrize("every", [2, 4])


def config_of(every, **changes):
    experts = MixtureOfExperts(num_experts=3, top_k=1, normalized=False, every=every, dense_after=24)
    return dataclasses.replace(MODEL, experts=experts, **changes)


def stack(config, block=Block, **compute):
    return Stack(config, Compute(**compute), causal=True, num_layers=config.num_layers, block=block)


def params_of(config):
    params = stack(config).init(jax.random.key(0), X, POSITIONS, SEGMENTS, deterministic=True)["params"]
    return jax.tree.map(lambda p: p + 0.1 * jnp.sin(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape), params)


def run(config, params, deterministic=False, **compute):
    rngs = {"dropout": jax.random.key(1)}
    module = stack(config, **compute)
    return module.apply({"params": params}, X, POSITIONS, SEGMENTS, deterministic=deterministic, rngs=rngs)


def in_a_row(params, every):
    """Returns the parameters of each layer, computed by hand."""
    before, own = params["between"]["blocks"], params["blocks"]
    found = []
    for i in range(MODEL.num_layers):
        turn, place = divmod(i, every)
        of_kind, number = (own, turn) if place == every - 1 else (before, turn * (every - 1) + place)
        found.append(jax.tree.map(lambda p, number=number: p[number], of_kind))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("every", few([2, 4], [2]))
def test_it_is_the_layers_one_after_the_other(every):
    config = config_of(every)
    params = params_of(config)
    (together, _), sown = stack(config).apply(
        {"params": params}, X, POSITIONS, SEGMENTS, deterministic=True, mutable=["intermediates"]
    )
    x, plain = X, dataclasses.replace(config, experts=None, norm_at="post")  # A post-norm stack has no final norm.
    hidden = hidden_states({"decoder": sown["intermediates"]})["decoder"]
    assert hidden.shape == (4, *X.shape)
    for i, layer in enumerate(in_a_row(params, every)):
        has_experts = "router" in layer["mlp"]
        assert has_experts == ("mlp_after" in layer) == (i % every == every - 1)
        experts = config.experts and dataclasses.replace(config.experts, every=None) if has_experts else None
        one = dataclasses.replace(plain, num_layers=1, experts=experts, norm_at="pre")
        own = {"blocks": jax.tree.map(lambda p: p[None], layer), "final_norm": params["final_norm"]}
        _, sown = stack(one).apply(
            {"params": own}, x, POSITIONS, SEGMENTS, deterministic=True, mutable=["intermediates"]
        )
        x = sown["intermediates"]["blocks"]["hidden"][0][0]
        np.testing.assert_allclose(hidden[i], x, atol=1e-5)  # float32, compiled separately
    assert together.shape == X.shape


@pytest.mark.slow
@EVERY
def test_parameters_of_a_kind_are_one_array_and_their_numbers_are_known(every):
    config = config_of(every)
    params = params_of(config)
    sizes = {name: len(x) for name, x in zip(parameter_names(params), jax.tree.leaves(params), strict=True)}
    turns = 4 // every
    for name, size in sizes.items():
        wanted = 4 - turns if name.startswith("between/") else turns
        assert size == wanted or name.startswith("final_norm"), name
    before, own = layer_indices({"decoder": params}).values()
    kinds = [list(kind.numbers) for kind in layer_groups(config, 4)]
    assert [list(before[0]), list(own[0])] == kinds == [[0, 2], [1, 3]] if every == 2 else [[0, 1, 2], [3]]
    kernel = params["between"]["blocks"]["mlp"]["up"]["kernel"]
    assert len(np.unique(kernel)) == kernel.size  # Each layer has its own initial values.


@pytest.mark.slow
@pytest.mark.parametrize("every", few([2, 4], [2]))
def test_how_it_runs_changes_no_gradient(every):
    config = config_of(every)
    params = params_of(config)

    def gradients(**compute):
        return jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(run(config, p, **compute)[0]))))(params)

    want = gradients()
    for compute in ({"scan_unroll": 1}, {"scan_unroll": 4}, {"remat": "block"}, {"remat": "dots", "scan_unroll": 4}):
        # float32, fused differently
        chex.assert_trees_all_close(gradients(**compute), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_what_is_said_by_layer_has_the_numbers_of_the_layers():
    config = config_of(2)
    _, side = run(config, params_of(config))
    tokens, _ = next(pair for name, pair in side.sums.items() if name.endswith("expert_tokens"))
    assert [name for name in side.sums if name.endswith("expert_tokens")] == ["layers/None/1:2/expert_tokens"]
    np.testing.assert_array_equal(tokens.sum(axis=1), [12, 12])  # The sums come from two layers.


class Counting(Block):
    """A block that adds its layer number to its state."""

    def __call__(self, x, layer, context, state=None, branch=None, source=None):
        y, side = super().__call__(x, layer, context, None, branch, source)
        return y, AuxOutputs(None if state is None else state + layer.number, side.sums)


@pytest.mark.slow
@EVERY
def test_the_states_of_blocks_are_in_the_order_of_the_layers(every):
    config = config_of(every)
    module, state = stack(config, Counting), 10 * jnp.arange(4)
    params = {"params": params_of(config)}
    _, side = module.apply(params, X, POSITIONS, SEGMENTS, state=state, deterministic=True)
    np.testing.assert_array_equal(side.state, [0, 11, 22, 33])


@pytest.mark.slow
def test_a_deeper_stack_is_no_longer_program():
    def program(layers):
        config = config_of(2, num_layers=layers)
        module = stack(config, scan_unroll=1)
        shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), X, POSITIONS, SEGMENTS, deterministic=True))
        traced = jax.make_jaxpr(lambda p: module.apply(p, X, POSITIONS, SEGMENTS, deterministic=True)[0])(shapes)
        return str(traced).count(" = ")  # the number of equations

    assert program(24) == program(4)
