"""Compares a stack whose layers lie on pipeline stages with the scan on one device."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import MeshConfig, ModelConfig, RelativePositionBuckets, RotaryPositions
from pretrainax.layers.compute import Compute
from pretrainax.layers.stack import Stack
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.rules import tree_shardings
from tests.support.tiers import few

ROWS, LENGTH, WIDTH, LAYERS = 16, 12, 16, 4
SIZES = dict(family="decoder", num_layers=LAYERS, d_model=WIDTH, d_ff=32, num_heads=4, num_kv_heads=2)
LOCAL = dict(layer_pattern=("local", "global"), window=4)
MODELS = {  # Each model passes a different kind of array to all layers: angles of each row, or a bias that rows share.
    "rotary": ModelConfig(**SIZES, **LOCAL, position=RotaryPositions(64, no_rotation_every=3)),
    "buckets": ModelConfig(**SIZES, position=RelativePositionBuckets(8, 16)),
}
MESH = dict(data=2, pipeline=2, tensor=2)


def stack(model, **compute):
    return Stack(MODELS[model], Compute(**compute), causal=True, num_layers=LAYERS)


@functools.cache
def inputs(model):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32)
    ids = 1 + (np.arange(LENGTH) >= rng.integers(2, LENGTH, (ROWS, 1)))
    positions = jnp.asarray(rng.integers(0, LENGTH, (ROWS, LENGTH)), jnp.int32)
    arrays = x, positions, jnp.asarray(ids, jnp.int32)
    return stack(model).init(jax.random.key(0), *arrays, deterministic=True)["params"], arrays


def output_and_gradients(model, mesh=None, rows=ROWS, **compute):
    """Returns the hidden states [B, T, D], and the gradients of their weighted mean for parameters and embeddings."""
    params, arrays = inputs(model)

    def loss(params, x, *others):
        y, _ = stack(model, **compute).apply({"params": params}, x, *others, deterministic=True)
        return jnp.mean(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), y

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    arrays = [x[:rows] for x in arrays]
    if mesh is None:
        (_, y), gradients = run(params, *arrays)
        return y, gradients
    devices = make_mesh(MeshConfig(**mesh))
    with jax.set_mesh(devices):
        placed = jax.device_put(params, tree_shardings(devices, {"decoder": params})["decoder"])
        (_, y), gradients = run(placed, *arrays)
    return y, gradients


@pytest.mark.slow
@pytest.mark.parametrize("parts", few([1, 2, 8], [2]))
def test_any_number_of_parts_gives_the_stream_and_gradients_of_one_device(parts):
    got = output_and_gradients("rotary", MESH, pipeline_microbatches=parts)
    # float32 sums in another order
    chex.assert_trees_all_close(got, output_and_gradients("rotary"), rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_a_bias_that_rows_share_has_its_gradient():
    got, expected = (output_and_gradients("buckets", mesh) for mesh in (MESH, None))
    assert float(jnp.abs(expected[1][0]["relative_bias"]["embedding"]).max()) > 1e-5
    chex.assert_trees_all_close(got, expected, rtol=2e-5, atol=2e-6)  # as above


@pytest.mark.slow
def test_what_is_made_again_is_the_same():
    got = output_and_gradients("rotary", MESH, remat="block")
    chex.assert_trees_all_close(got, output_and_gradients("rotary"), rtol=2e-5, atol=2e-6)  # as above


@pytest.mark.slow
def test_rows_that_the_mesh_does_not_divide_are_computed_too():
    got = output_and_gradients("rotary", MESH, rows=3)
    chex.assert_trees_all_close(got, output_and_gradients("rotary", rows=3), rtol=2e-5, atol=2e-6)  # as above


def test_who_asks_for_what_is_between_the_layers_gets_all_of_it():
    params, arrays = inputs("rotary")
    with jax.set_mesh(make_mesh(MeshConfig(**MESH))):
        run = jax.jit(
            lambda params, *x: stack("rotary").apply(
                {"params": params}, *x, deterministic=True, mutable=["intermediates"]
            )
        )
        kept = run(params, *arrays)[1]["intermediates"]
    assert kept["blocks"]["hidden"][0].shape == (LAYERS, ROWS, LENGTH, WIDTH)


@pytest.mark.slow
def test_dropout_is_another_one_for_each_row_and_layer_and_the_same_for_the_same_key():
    config = ModelConfig(**SIZES, dropout_rate=0.5)
    dropping = Stack(config, Compute(), causal=True, num_layers=LAYERS)
    row = np.random.default_rng(0).normal(size=(1, LENGTH, WIDTH))
    same = jnp.asarray(row.repeat(ROWS, 0), jnp.float32), *(jnp.ones((ROWS, LENGTH), jnp.int32),) * 2
    params = dropping.init(jax.random.key(0), *same, deterministic=True)["params"]
    run = jax.jit(lambda key: dropping.apply({"params": params}, *same, deterministic=False, rngs={"dropout": key})[0])
    with jax.set_mesh(make_mesh(MeshConfig(**MESH))):
        first, again, other = (np.asarray(run(jax.random.key(seed))) for seed in (1, 1, 2))
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert len({row.tobytes() for row in first}) == ROWS


@pytest.mark.slow
def test_the_stream_goes_on_by_permutes_and_no_device_has_all_layers():
    params, arrays = inputs("rotary")
    devices = make_mesh(MeshConfig(data=1, pipeline=2, fsdp=4))
    with jax.set_mesh(devices):
        shardings = tree_shardings(devices, {"decoder": params})["decoder"]
        placed = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings)
        run = jax.jit(
            jax.grad(lambda params, *x: stack("rotary").apply({"params": params}, *x, deterministic=True)[0].sum())
        )
        program = run.lower(placed, *arrays).compile().as_text()
    assert program.count(" collective-permute(") == 2  # one in the forward and one in the backward
    assert f"f32[{LAYERS // 2},{WIDTH},32]" in program  # the whole layers of one stage
    assert not re.search(rf"f32\[{LAYERS},{WIDTH},(32|8)\]", program)
