"""Tests the optimizers on 8 devices: the same updates as on one device, sharded states, and exact checkpoints."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pretrainax import models
from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.config import Choice, LearnedPositions, MeshConfig, ModelConfig, TrainConfig, kinds
from pretrainax.layers.compute import Compute, resolve_auto
from pretrainax.optim import SOAP, Adafactor, Muon, ScheduleFreeAdamW, Sophia, WarmupConstant
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.optimizer_state import opt_state_shardings
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.sharding.rules import with_shardings
from pretrainax.training import train_step
from tests.support import tables
from tests.support.tiers import few

# The model has no biases: a key bias has a gradient of only rounding noise, which these optimizers would scale up to
# the size of other updates.
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
OPTIMIZERS = {cls.__name__: cls() for cls in Choice.alternatives(kinds.Optimizer)}
OPTIMIZERS["Adafactor"] = Adafactor(min_factored_size=4)  # No matrix here has a side of 128.
OPTIMIZERS["NorMuon"] = Muon(neuron_b2=0.95)
OPTIMIZERS["SOAP"] = SOAP(epsilon=1e-3)  # above the rounding noise of rotated gradients that are zero
WIDTH = CONFIG.d_model
PARAMS = {
    "decoder": {
        "blocks": {
            "self_attention": {"query": {"kernel": (2, WIDTH, 4, 6)}, "out": {"kernel": (2, 4, 6, WIDTH)}},
            "mlp": {"up": {"kernel": (2, WIDTH, 64)}},
            "mlp_norm": {"scale": (2, WIDTH)},
        }
    },
    "token_embedding": {"embedding": (48, WIDTH)},
}
PARAMS = jax.tree.map(
    lambda shape: np.random.default_rng(0).normal(size=shape).astype(np.float32),
    PARAMS,
    is_leaf=lambda x: isinstance(x, tuple),
)
MODEL = models.build(CONFIG, Compute())


def mesh_named(name):
    return make_mesh(MESHES[name], jax.devices()[: 1 if name == "1 device" else 8])


def built(name):
    return OPTIMIZERS[name].build(WarmupConstant(0).build(1e-2, 10), PARAMS)


def gradients_at(params):
    """Returns the gradients of a function with a diagonal Hessian that is not constant."""
    waves = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
    return jax.tree.map(lambda x, wave: jnp.sin(3.0 * x) + 0.1 * wave, params, waves)


@functools.cache
def updated(name, mesh_name):
    """Returns the jitted update of (state, number), the states before and after it, and their shardings."""
    mesh, tx = mesh_named(mesh_name), built(name)
    shardings = train_step.state_shardings(mesh, tx, PARAMS)

    def update(state, number):
        updates, opt_state = tx.update(
            gradients_at(state.params), state.opt_state, state.params, step=number, gradients_at=gradients_at
        )
        return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)

    def on_mesh(state, number):
        with jax.set_mesh(mesh):
            return jitted(state, number)

    jitted = jax.jit(update, out_shardings=shardings)
    before = jax.device_put(train_step.TrainState(jnp.int32(0), PARAMS, tx.init(PARAMS)), shardings)
    return on_mesh, before, on_mesh(before, jnp.int32(0)), shardings


@pytest.mark.first(3)
@pytest.mark.parametrize("name", few(OPTIMIZERS, list(OPTIMIZERS)[:4]))
def test_updates_on_eight_devices_are_those_of_one(name):
    jitted, _, alone, _ = updated(name, "1 device")
    sharded, _, state, shardings = updated(name, "2 data 2 fsdp 2 tensor")
    if name == "SOAP":  # rounding determines a part of its first bases
        state = jax.device_put(alone, shardings)
    alone, state = jitted(alone, jnp.int32(1)), sharded(state, jnp.int32(1))
    # float32 sums in another order
    chex.assert_trees_all_close(jax.device_get(state), jax.device_get(alone), rtol=2e-5, atol=2e-6)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings


@pytest.mark.first(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_state_goes_on_bit_for_bit(name, tmp_path):
    update, _, once, shardings = updated(name, "2 data 2 fsdp 2 tensor")
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    checkpoints.save(1, once, {})
    _, restored, _ = checkpoints.restore_newest(with_shardings(once, shardings))
    checkpoints.close()
    chex.assert_trees_all_equal(update(restored, jnp.int32(1)), update(once, jnp.int32(1)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_fsdp_a_device_holds_an_eighth_of_what_has_the_width(name):
    state = jax.eval_shape(built(name).init, PARAMS)
    shardings = opt_state_shardings(mesh_named("8 fsdp"), built(name), PARAMS)
    leaves = zip(parameter_names(state), *map(jax.tree.leaves, (state, shardings)), strict=True)
    matrices = [(path, x, sharding) for path, x, sharding in leaves if "norm" not in path and WIDTH in x.shape]
    assert matrices
    for path, x, sharding in matrices:
        assert math.prod(sharding.shard_shape(x.shape)) == x.size // 8, path


# --- optimizers with support from the training step -----------------------------------------------------------------


def make_batch():
    rng = np.random.default_rng(0)
    highest = {"positions": 16, "segment_ids": 2}
    batch = {name: rng.integers(0, highest.get(name, 64), x.shape, dtype=np.int32) for name, x in SHAPES.items()}
    return batch | {"loss_weights": np.ones(SHAPES["loss_weights"].shape, np.float32)}


def two_steps(optimizer, mesh_name, **train):
    mesh, train = mesh_named(mesh_name), resolve_auto(TrainConfig(scan_unroll=1, **train))
    schedule = WarmupConstant(0).build(optimizer.learning_rate, 10)
    tx = optimizer.build(schedule, train_step.abstract_params(MODEL, SHAPES))
    with jax.set_mesh(mesh):
        state = train_step.make_init(MODEL, tx, SHAPES, mesh)(0)
        step = train_step.make_train_step(MODEL, tx, schedule, train, mesh, optimizer)
        batch = put_batch(make_batch(), mesh)
        for _ in range(2):
            state, metrics = step(state, batch)
    return jax.device_get((state, metrics["gradient_norm"]))


SERVED = {"schedule-free": ScheduleFreeAdamW(1e-2), "Sophia": Sophia(1e-2, interval=1)}


@pytest.mark.slow
@pytest.mark.parametrize("name", few(SERVED, ["schedule-free"]))
def test_a_step_on_eight_devices_in_micro_batches_is_that_of_one(name):
    alone, _ = two_steps(SERVED[name], "1 device")
    state, _ = two_steps(SERVED[name], "2 data 2 fsdp 2 tensor", accumulate=2)
    # float32 sums in another order; the curvature is a difference of gradients.
    chex.assert_trees_all_close(state, alone, rtol=1e-3, atol=1e-5)


def test_every_optimizer_that_the_step_serves_is_here():
    special = {name for name, o in OPTIMIZERS.items() if o.needs_gradient_function or o.has_gradient_point}
    assert special == {type(optimizer).__name__ for optimizer in SERVED.values()}
