"""A step of optimizers whose state is more than moments: on 8 devices the same as on one, with its state in shards."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest

from pretrainax import models
from pretrainax.config import LearnedPositions, MeshConfig, ModelConfig, TrainConfig
from pretrainax.layers.compute import Compute, for_this_machine
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training import train_step
from tests.support import tables

# Without biases: the gradient of a key's is rounding alone, which these optimizers make as large as any other.
CONFIG = ModelConfig(
    family="decoder",
    vocab_size=64,
    num_layers=2,
    d_model=32,
    d_ff=64,
    num_heads=4,
    use_bias=False,
    position=LearnedPositions(16),
)
SHAPES = tables.example_shapes(CONFIG, batch_size=8)
MESHES = {
    "1 device": MeshConfig(data=1),
    "8 fsdp": MeshConfig(data=1, fsdp=8),
    "2 data 2 fsdp 2 tensor": MeshConfig(data=2, fsdp=2, tensor=2),
}


def make_batch():
    rng = np.random.default_rng(0)
    highest = {"positions": 16, "segment_ids": 2}
    batch = {name: rng.integers(0, highest.get(name, 64), x.shape, dtype=np.int32) for name, x in SHAPES.items()}
    return batch | {"loss_weights": np.ones(SHAPES["loss_weights"].shape, np.float32)}


@functools.cache
def one_step(name, mesh_name):
    """The state after a step, and where `abstract_state` says that it lies."""
    mesh = make_mesh(MESHES[mesh_name], jax.devices()[: 1 if mesh_name == "1 device" else 8])
    optimizer = optax.with_extra_args_support(tables.optimizer(name))
    model, train = models.build(CONFIG, Compute()), for_this_machine(TrainConfig())
    with jax.set_mesh(mesh):
        state = train_step.init_state(model, optimizer, SHAPES, mesh, seed=0)
        expected = train_step.abstract_state(model, optimizer, SHAPES, mesh)
        step = train_step.make_train_step(model, optimizer, lambda step: step, train, mesh)
        state, _ = step(state, put_batch(make_batch(), mesh))
    return state, expected


@pytest.mark.parametrize("mesh", list(MESHES)[1:])
@pytest.mark.parametrize("name", tables.OPTIMIZERS)
def test_a_step_on_eight_devices_is_that_of_one(name, mesh):
    (alone, _), (state, expected) = one_step(name, "1 device"), one_step(name, mesh)
    # float32 sums in another order
    chex.assert_trees_all_close(jax.device_get(state), jax.device_get(alone), rtol=2e-5, atol=2e-7)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, alone)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, expected)


@pytest.mark.parametrize("name", tables.OPTIMIZERS)
def test_with_fsdp_a_device_holds_an_eighth_of_what_has_the_width(name):
    state, _ = one_step(name, "8 fsdp")
    matrices = [
        (path, x)
        for path, x in zip(parameter_names(state.opt_state), jax.tree.leaves(state.opt_state), strict=True)
        if path.endswith(("kernel", "embedding")) and CONFIG.d_model in x.shape
    ]
    assert matrices
    for path, x in matrices:
        assert {s.data.size for s in x.addressable_shards} == {x.size // 8}, path
