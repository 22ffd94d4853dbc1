"""Compares layers of static kinds with one block for all kinds, and tests that a GPU step has no conditional."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import pytest

from pretrainax.config import MeshConfig, ModelConfig, RotaryPositions, UserError
from pretrainax.layers.attention_spec import collect_attention_specs
from pretrainax.layers.block import Block
from pretrainax.layers.compute import Compute
from pretrainax.layers.layer_kinds import _runs
from pretrainax.layers.stack import Stack
from pretrainax.planning.topologies import Topology
from pretrainax.sharding.mesh import make_mesh

GEMMA, MODERNBERT = ("local",) * 5 + ("global",), ("global", "local", "local")
MODEL = ModelConfig(
    num_layers=8,
    d_model=16,
    d_ff=32,
    num_heads=4,
    dropout_rate=0.0,
    window=4,
    position=RotaryPositions(theta=1e4, local_theta=1e2),
)
X = jax.random.normal(jax.random.key(5), (2, 9, 16))
POSITIONS = jnp.tile(jnp.arange(9), (2, 1))
SEGMENTS = jnp.asarray([[1] * 9, [1] * 4 + [2] * 3 + [0] * 2])


def stack(config, **compute):
    return Stack(config, Compute(**compute), causal=True, num_layers=config.num_layers)


@functools.cache
def params_of(config_fields):
    config = dataclasses.replace(MODEL, **dict(config_fields))
    return stack(config).init(jax.random.key(0), X, POSITIONS, SEGMENTS, deterministic=True)


def results(changes, deterministic=True, **compute):
    """Returns the hidden states, and the gradients of a function of them."""
    params, config = params_of(tuple(changes.items())), dataclasses.replace(MODEL, **changes)
    rngs = {} if deterministic else {"dropout": jax.random.key(3)}

    @jax.jit
    def run(params):
        def objective(params):
            x, _ = stack(config, **compute).apply(
                params, X, POSITIONS, SEGMENTS, deterministic=deterministic, rngs=rngs
            )
            return jnp.sum(jnp.sin(x)), x

        return jax.grad(objective, has_aux=True)(params)

    return run(params)


@pytest.fixture
def on_gpu(monkeypatch):
    """Makes stacks choose layers as on a GPU; returns the kinds of the blocks that were traced."""
    traced, call = [], Block.__call__

    def record(self, x, layer, context, *args, **kwargs):
        traced.append(context.is_local)
        return call(self, x, layer, context, *args, **kwargs)

    def start():
        monkeypatch.setattr("pretrainax.layers.stack.platform", lambda: "gpu")
        monkeypatch.setattr(Block, "__call__", record)
        return traced

    return start


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "pattern, layers, compute",
    [
        (GEMMA, 8, {"scan_unroll": 8}),  # one period and two layers of the next
        (MODERNBERT, 8, {"scan_unroll": 1}),  # a loop over two periods
        (MODERNBERT, 6, {"scan_unroll": 6, "remat": "block"}),
        (GEMMA, 4, {"scan_unroll": 1}),  # less than one period
        (("local", "global"), 8, {"scan_unroll": 4}),
    ],
)
def test_static_kinds_give_the_same_values_and_gradients(pattern, layers, compute, on_gpu):
    changes = {"layer_pattern": pattern, "num_layers": layers}
    expected = results(changes)
    traced = on_gpu()
    got = results(changes, **compute)
    # float32 rounding over 8 layers; XLA fuses differently
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)
    runs = _runs(pattern[:layers]) + _runs(pattern[: layers % len(pattern)] if layers > len(pattern) else ())
    assert traced == [is_local for is_local, _ in runs]  # Each run of equal layers traces a block once.


@pytest.mark.slow
def test_each_layer_draws_its_own_dropout(on_gpu, monkeypatch):
    on_gpu()
    changes = {"layer_pattern": MODERNBERT, "num_layers": 8, "dropout_rate": 0.5}
    keys = []

    def record(rate, x, key):
        jax.debug.callback(lambda data: keys.append(tuple(data.tolist())), jax.random.key_data(key))
        return x

    monkeypatch.setattr("pretrainax.layers.dropout.apply_dropout", record)
    params, config = params_of(tuple(changes.items())), dataclasses.replace(MODEL, **changes)
    module, rngs = stack(config, scan_unroll=1), {"dropout": jax.random.key(3)}
    jax.block_until_ready(module.apply(params, X, POSITIONS, SEGMENTS, deterministic=False, rngs=rngs))
    jax.effects_barrier()
    assert len(keys) == len(set(keys)) == 2 * 8  # Each of the 8 layers has two sublayers.


def test_both_kinds_are_reported_before_a_backend_is_chosen():
    with collect_attention_specs() as specs:
        config = dataclasses.replace(MODEL, layer_pattern=MODERNBERT)
        jax.eval_shape(
            lambda: stack(config).init(jax.random.key(0), X, POSITIONS, SEGMENTS, deterministic=True),
        )
    assert {spec.window for spec in specs} == {4, None} and len(specs) == 2


@pytest.mark.aot
@pytest.mark.first(1)
@pytest.mark.parametrize("pattern, causal, fused", [(GEMMA, True, 6), (MODERNBERT, False, 2)])
@pytest.mark.parametrize("unroll", [1, 6])
def test_a_step_for_a_gpu_has_no_conditional_and_both_kinds_choose_their_kernel(pattern, causal, fused, unroll):
    """Tests that only the global layers of an encoder use cuDNN, which has no kernel for two-sided windows."""
    config = dataclasses.replace(MODEL, layer_pattern=pattern, num_layers=6, d_model=32)  # Heads have width 8.
    try:
        mesh = make_mesh(MeshConfig(), Topology.parse("h100:1").devices())
    except UserError as e:
        pytest.skip(str(e))
    module = Stack(config, Compute("bfloat16", scan_unroll=unroll), causal=causal, num_layers=6)

    def objective(params, x, ids):
        return jnp.sum(jnp.sin(module.apply(params, x, ids, ids, deterministic=True)[0].astype(jnp.float32)))

    x, ids = jax.ShapeDtypeStruct((2, 64, 32), jnp.bfloat16), jax.ShapeDtypeStruct((2, 64), jnp.int32)
    with jax.set_mesh(mesh):
        params = jax.eval_shape(lambda *x: module.init(jax.random.key(0), *x, deterministic=True), x, ids, ids)
        text = jax.jit(jax.grad(objective)).lower(params, x, ids).compile().as_text()
    assert not re.findall(r"\bconditional\(", text)
    kernels = len(re.findall(r'custom_call_target="__cudnn\$fmha', text))
    in_loop = 2 if pattern is GEMMA else 1  # the number of calls in a loop over periods
    assert kernels == 2 * (fused if unroll > 1 else in_loop)
