import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tables
from flax import struct

from pretrainax import models, sharding, train_step
from pretrainax.config import LearnedPositions, MeshConfig, ModelConfig, RelativePositionBuckets, TrainConfig
from pretrainax.layers.compute import Compute
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.paths import parameter_names

MODELS = {
    "encoder": dict(position=LearnedPositions(16), norm_at="post", masked_lm_head=True, num_token_types=2),
    "encoder_decoder": dict(position=RelativePositionBuckets(), norm="rms", use_bias=False, gated=True),
    "decoder": dict(position=LearnedPositions(16), num_kv_heads=2),
}
MESHES = {
    "1 device": dict(data=1),
    "8 data": dict(data=8),
    "8 fsdp": dict(data=1, fsdp=8),
    "2 data 2 fsdp 2 tensor": dict(data=2, fsdp=2, tensor=2),
}
ROWS = 32


def model_config(family, **fields):
    small = dict(vocab_size=64, num_layers=2, d_model=32, d_ff=64, num_heads=4)
    return ModelConfig(family=family, **small, **MODELS[family], **fields)


def make_mesh(name):
    sizes = MESHES[name]
    return sharding.make_mesh(MeshConfig(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])


def make_batch(config, seed=0):
    """Random rows; the loss counts of two rows, and so of two micro-batches or devices, differ."""
    rng = np.random.default_rng(seed)
    batch = {}
    for name, x in tables.example_shapes(config, batch_size=ROWS).items():
        highest = {"positions": 16, "encoder_positions": 16, "masked_positions": 16, "token_types": 2}.get(name, 64)
        batch[name] = rng.integers(0, highest, x.shape, dtype=np.int32)
        if name.endswith("segment_ids"):
            batch[name] = (np.arange(x.shape[1]) < rng.integers(4, x.shape[1] + 1, (ROWS, 1))).astype(np.int32)
    shape = batch["targets"].shape
    batch["loss_weights"] = (rng.random(shape) < rng.random((ROWS, 1))).astype(np.float32)
    return batch


class Run:
    """A model in training on a mesh; enters the mesh for each call, as main does once."""

    def __init__(self, config, mesh="1 device", optimizer=None, **train):
        self.mesh = make_mesh(mesh)
        self.config, self.train = config, TrainConfig(**train)
        self.model = config if not isinstance(config, ModelConfig) else models.build(config, Compute())
        self.shapes = tables.example_shapes(config, ROWS) if isinstance(config, ModelConfig) else config.shapes
        schedule = WarmupCosine(warmup_steps=2).build(1e-3, 10)
        with jax.set_mesh(self.mesh):
            params = train_step.abstract_params(self.model, self.shapes)
            self.optimizer = (optimizer or AdamW()).build(schedule, params)
            self.step = train_step.make_train_step(self.model, self.optimizer, schedule, self.train, self.mesh)
            self.state = train_step.init_state(self.model, self.optimizer, self.shapes, self.mesh, self.train.seed)

    def put(self, batch):
        return sharding.put_batch(batch, self.mesh)

    def __call__(self, batch):
        with jax.set_mesh(self.mesh):
            self.state, metrics = self.step(self.state, self.put(batch))
        return jax.device_get(metrics)

    def losses(self, steps):
        sums = [self(make_batch(self.config, seed))["sums"]["loss"] for seed in range(steps)]
        return [float(total / count) for total, count in sums]

    def compiled(self):
        with jax.set_mesh(self.mesh):
            state = train_step.abstract_state(self.model, self.optimizer, self.shapes, self.mesh)
            return self.step.lower(state, self.put(make_batch(self.config))).compile()


# --- the same mathematics on any mesh ------------------------------------------------------------------------------

# Adam divides a gradient by its own size: where a gradient is rounding noise alone (the bias of a key, which softmax
# ignores), so is the update. An epsilon above the noise keeps such updates small; everything else is as in a real run.
STEADY = AdamW(epsilon=1e-3, weight_decay=0.1)


@functools.cache
def five_steps(family, mesh, accumulate):
    run = Run(model_config(family), mesh, STEADY, accumulate=accumulate, z_loss=1e-4, label_smoothing=0.1)
    return run.losses(5), jax.device_get(run.state.params)


@pytest.mark.parametrize("mesh", list(MESHES)[1:])
@pytest.mark.parametrize("family", MODELS)
def test_meshes_and_micro_batches_change_neither_losses_nor_parameters(family, mesh):
    losses, params = five_steps(family, "1 device", accumulate=1)
    other_losses, other_params = five_steps(family, mesh, accumulate=4)
    np.testing.assert_allclose(other_losses, losses, rtol=2e-5)
    for name, a, b in zip(
        parameter_names(params), jax.tree.leaves(params), jax.tree.leaves(other_params), strict=True
    ):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=0, err_msg=name)
