"""Compares 1F1B with GPipe and with one device: gradients, metrics, dropout, and the memory of a compiled step."""

import functools
import math

import chex
import jax
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import (
    LearnedPositions,
    MeshConfig,
    ModelConfig,
    RelativePositionBuckets,
    RotaryPositions,
    TrainConfig,
)
from pretrainax.layers.compute import Compute, compute_for, resolve_auto
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.rules import tree_shardings
from pretrainax.training import train_step
from tests.support.tiers import few

ROWS, LENGTH = 32, 15  # Two stages cannot split the tokens evenly.
SIZES = dict(family="decoder", num_layers=4, d_model=32, d_ff=64, num_heads=4, vocab_size=64)
MODELS = {  # Differ in the modules before, around and after the layers.
    "tied": dict(position=RotaryPositions(16, no_rotation_every=2), num_kv_heads=2, norm="rms"),
    "shared bias, post norm": dict(position=RelativePositionBuckets(), norm_at="post", output_bias=True),
    "own matrix": dict(position=LearnedPositions(16), tie_embeddings=False, scale_embeddings=True),
    "narrow": dict(position=LearnedPositions(16), embedding_dim=16, masked_lm_head=True),
}
MESH = dict(data=2, pipeline=2, tensor=2)
SCHEDULE = "1f1b"
LOSS = dict(z_loss=1e-3, label_smoothing=0.1)


def batch(length=LENGTH, rows=ROWS):
    rng = np.random.default_rng(0)
    places, shape = np.arange(length), (rows, length)
    ids = 1 + (places >= rng.integers(2, length, (rows, 1)))
    return {
        "tokens": rng.integers(0, 64, shape, dtype=np.int32),
        "targets": rng.integers(0, 64, shape, dtype=np.int32),
        "loss_weights": (rng.random(shape) < rng.random((rows, 1))).astype(np.float32),
        "text_weights": (rng.random(shape) < 0.5).astype(np.float32),
        "target_bytes": rng.integers(1, 99, rows).astype(np.float32),
        "segment_ids": ids.astype(np.int32),
        "positions": np.where(ids == 1, places, 0).astype(np.int32),
    }


@functools.cache
def fresh(name):
    model = models.build(ModelConfig(**SIZES, **MODELS[name]), Compute())
    params = model.init(jax.random.key(0), batch(), deterministic=True)["params"]
    rng = np.random.default_rng(1)  # Norms and biases are not ones and zeros.
    return jax.tree.map(lambda x: np.asarray(x + 0.1 * rng.normal(size=x.shape), np.float32), params)


def compiled(name, mesh, rows=None, changes=None, **train):
    """Compiles the function that returns (gradients, (objective, sums)); returns it and its arguments."""
    devices = make_mesh(MeshConfig(**mesh), jax.devices()[: math.prod(mesh.values())])
    with jax.set_mesh(devices):
        train = resolve_auto(TrainConfig(**train))
        model = models.build(ModelConfig(**(SIZES | MODELS[name] | (changes or {}))), compute_for(train))
        placed = jax.device_put(fresh(name), tree_shardings(devices, fresh(name)))
        given = placed, put_batch(rows or batch(), devices), {"dropout": jax.random.key(3)}, None
        return jax.jit(train_step._make_gradients(model, train, devices)).lower(*given).compile(), given


def made(*args, **fields):
    step, given = compiled(*args, **fields)
    return jax.device_get(step(*given))


@functools.cache
def on_one_device(name):
    return made(name, dict(data=1), **LOSS)


@pytest.mark.slow
@pytest.mark.parametrize("name", few(MODELS, ["tied"]))
def test_each_gradient_and_each_sum_is_that_of_one_device(name):
    expected = on_one_device(name)
    assert {"loss", "accuracy", "text_loss", "bits_per_byte", "z_loss"} <= set(expected[1][1])
    got = made(name, MESH, pipeline_schedule=SCHEDULE, **LOSS)
    chex.assert_trees_all_close(got, expected, rtol=2e-5, atol=2e-6)  # float32, another order


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", SCHEDULE])
def test_in_bfloat16_a_step_is_compiled_for_a_cpu_and_near_float32(schedule):
    """XLA's CPU compiler aborted at bfloat16 sums along the pipeline axis."""
    mesh, expected = dict(data=1, pipeline=2), on_one_device("tied")
    got = made("tied", mesh, dtype="bfloat16", pipeline_schedule=schedule, **LOSS)
    for one, other in zip(*(jax.tree.leaves(found[0]) for found in (got, expected)), strict=True):
        # bfloat16 has 8 bits of precision: one device in bfloat16 differs by up to 0.037.
        assert np.linalg.norm(one - other) < 0.04 * np.linalg.norm(other)
    np.testing.assert_allclose(got[1][0], expected[1][0], rtol=2e-4)  # a mean over all tokens


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_gradients_are_the_same_for_any_number_of_parts(parts):
    got = made(
        "tied", dict(data=1, pipeline=4, fsdp=2), **LOSS, pipeline_schedule=SCHEDULE, pipeline_microbatches=parts
    )
    chex.assert_trees_all_close(got, on_one_device("tied"), rtol=2e-5, atol=2e-6)  # as above


@pytest.mark.slow
def test_gradients_are_the_same_bit_for_bit_when_they_are_made_again():
    step, given = compiled("tied", MESH, pipeline_schedule=SCHEDULE, changes={"dropout_rate": 0.1})
    chex.assert_trees_all_equal(*(jax.device_get(step(*given)) for _ in range(2)))


@pytest.mark.slow
def test_dropout_is_that_of_gpipe():
    """The backward recomputes the layers of a microbatch, with the dropout mask of its forward."""
    changes = {"dropout_rate": 0.3}
    one, other = (made("tied", MESH, pipeline_schedule=schedule, changes=changes) for schedule in ("gpipe", SCHEDULE))
    chex.assert_trees_all_close(other, one, rtol=2e-5, atol=2e-6)  # as above


def temporaries(parts, schedule):
    """Returns the temporary memory of a device for `parts` microbatches of one row, in sizes of a residual stream."""
    rows, changes = batch(length=128, rows=parts), {"position": RotaryPositions(128)}
    mesh = dict(data=1, pipeline=4, tensor=2)
    step, _ = compiled("tied", mesh, rows, changes, pipeline_schedule=schedule, remat="block")
    return step.memory_analysis().temp_size_in_bytes / (4 * 128 * SIZES["d_model"])


@pytest.mark.slow
def test_with_many_parts_a_step_needs_a_fraction_of_what_gpipe_needs():
    (few, more), (gpipe_few, gpipe_more) = ([temporaries(m, kind) for m in (32, 64)] for kind in (SCHEDULE, "gpipe"))
    # For each microbatch, GPipe stores the residual stream at both ends, a layer's input and its output. 1F1B stores
    # here a quarter of the embeddings and of their gradient, and the positions of the tokens.
    assert more - few < 32 < 4 * 32 < gpipe_more - gpipe_few
    assert more < gpipe_more / 3
