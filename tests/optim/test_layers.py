"""Tests learning rates by layer: order of layers, gradual unfreezing, frozen layers; on one device and on eight."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models, zoo
from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.config import (
    Choice,
    Generator,
    LayersConfig,
    ModelConfig,
    MultiTokenPrediction,
    RelativePositionBuckets,
    UserError,
    kinds,
)
from pretrainax.config.validation import validate
from pretrainax.layers.compute import resolve_auto
from pretrainax.optim import AdamW, WarmupConstant
from pretrainax.optim.layers import count_trained, layers_above, rate_factors, trained_mask, with_layer_rates
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.training import train_step
from tests.support import tiny
from tests.training.test_optimizer_states import MODEL, PARAMS, SHAPES, gradients_at, make_batch, mesh_named

ABOVE = {  # preset -> the end of a parameter path -> number of layers above it
    "bert_base": {
        "pair_head/output/kernel": 0,
        "unembedding/bias": 0,
        "encoder/blocks/mlp/up/kernel": list(range(12, 0, -1)),
        "token_embedding/embedding": 13,
        "token_type_embedding/embedding": 13,
        "embedding_norm/scale": 13,
    },
    "albert_base": {"encoder/blocks/mlp/up/kernel": [1], "embedding_projection/kernel": 2},
    "t5_base": {
        "encoder/final_norm/scale": 0,
        "encoder/blocks/mlp_norm/scale": list(range(12, 0, -1)),
        "decoder/blocks/cross_attention/out/kernel": list(range(12, 0, -1)),
        "decoder/relative_bias/embedding": 13,
        "token_embedding/embedding": 13,
    },
    "switch_base_8": {
        "encoder/between/blocks/mlp/up/kernel": list(range(12, 0, -2)),
        "encoder/blocks/mlp/experts_up/kernel": list(range(11, 0, -2)),
        "decoder/between/blocks/cross_attention/out/kernel": list(range(12, 0, -2)),
        "decoder/blocks/mlp_norm/scale": list(range(11, 0, -2)),
        "decoder/relative_bias/embedding": 13,
    },
    "bart_base": {"decoder_embedding_norm/bias": 7, "decoder_position_embedding/embedding": 7},
    "llama3_8b": {"unembedding/kernel": 0, "decoder/final_norm/scale": 0},
}


@pytest.mark.parametrize("preset", ABOVE)
def test_the_layers_above_a_parameter_are_counted_in_its_stack(preset):
    params = models.abstract_params(zoo.preset(preset))
    found = dict(zip(parameter_names(params), jax.tree.leaves(layers_above(params)), strict=True))
    assert {path: found[path].ravel().tolist() for path in ABOVE[preset]} == {
        path: above if isinstance(above, list) else [above] for path, above in ABOVE[preset].items()
    }


def test_every_embedding_of_deberta_is_below_its_blocks():
    params = models.abstract_params(zoo.preset("deberta_v3_base"))
    discriminator = {name: params[name] for name in params if name not in ("generator", "embedding_difference")}
    found = zip(parameter_names(discriminator), jax.tree.leaves(layers_above(discriminator)), strict=True)
    below = {path for path, above in found if above.max() == 13}
    assert "encoder/relative_embedding/norm/scale" in below
    assert all("embedding" in path and "unembedding" not in path for path in below)


def test_the_blocks_of_multi_token_prediction_are_above_the_last_block():
    small = {"vocab_size": 8, "num_layers": 2, "d_model": 4, "d_ff": 8, "num_heads": 2}
    model = ModelConfig(**small, position=RelativePositionBuckets(), multi_token=MultiTokenPrediction())
    params = models.abstract_params(model)
    assert all(above.tolist() == 0 for above in jax.tree.leaves(layers_above(params)["multi_token"]))
    trained = trained_mask(LayersConfig(frozen=2, frozen_embeddings=True), params)
    assert all(map(np.all, jax.tree.leaves(trained["multi_token"])))
    assert not np.any(trained["decoder"]["blocks"]["mlp"]["up"]["kernel"])


SMALL = {
    "head": {"kernel": np.ones(3, np.float32)},
    "decoder": {"blocks": {"mlp": {"kernel": np.ones((2, 3, 3), np.float32)}}},
    "token_embedding": {"embedding": np.ones((4, 3), np.float32)},
}


def at(step, **layers):
    """Returns the factors of the head, the last block, the first block and the embeddings."""
    found = rate_factors(LayersConfig(**layers), SMALL, jnp.int32(step))
    first, last = found["decoder"]["blocks"]["mlp"]["kernel"].ravel()
    return [float(x) for x in (found["head"]["kernel"], last, first, found["token_embedding"]["embedding"])]


def test_a_rate_decays_with_the_layers_above():
    assert at(0, rate_decay=0.5) == at(9, rate_decay=0.5) == [1.0, 0.5, 0.25, 0.125]
    assert at(0, rate_decay=0.5, frozen=1, frozen_embeddings=True) == [1.0, 0.5, 0.0, 0.0]


def test_layers_begin_one_after_the_other_from_above():
    found = [at(step, unfreeze_every=2) for step in range(7)]
    assert [row.index(0.0) if 0.0 in row else 4 for row in found] == [1, 1, 2, 2, 3, 3, 4]
    assert {x for row in found for x in row} == {0.0, 1.0}


def test_a_layer_that_begins_rises_to_its_own_rate():
    found = np.array([at(step, rate_decay=0.5, unfreeze_every=2, unfreeze_warmup=4) for step in range(10)])
    # The factor rises to 0.5 from step 2 on.
    np.testing.assert_array_equal(found[:, 1], np.array([0, 0, 1, 2, 3, 4, 4, 4, 4, 4]) / 8)
    np.testing.assert_array_equal(found[:, 3], np.array([0, 0, 0, 0, 0, 0, 1, 2, 3, 4]) / 32)


OPTIMIZERS = {cls.__name__: cls() for cls in Choice.alternatives(kinds.Optimizer)}


@pytest.mark.first(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_frozen_keeps_every_bit_with_any_optimizer(name):
    layers = LayersConfig(frozen=1, frozen_embeddings=True)
    optimizer = dataclasses.replace(OPTIMIZERS[name], weight_decay=0.5)
    tx = with_layer_rates(layers, optimizer, optimizer.build(WarmupConstant(0).build(0.1, 10), PARAMS), PARAMS)
    params, state = PARAMS, tx.init(PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.build(lambda step: 0.1, PARAMS).init(PARAMS))

    @jax.jit
    def update(params, state, step):
        updates, state = tx.update(gradients_at(params), state, params, step=step, gradients_at=gradients_at)
        return jax.tree.map(jnp.add, params, updates), state

    for step in range(2):
        params, state = update(params, state, jnp.int32(step))
    blocks, before = params["decoder"]["blocks"], PARAMS["decoder"]["blocks"]
    for found, old in zip(jax.tree.leaves(blocks), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(found[0], old[0])
        assert np.abs(found[1] - old[1]).min() > 0
    chex.assert_trees_all_equal(params["token_embedding"], PARAMS["token_embedding"])


# --- in the training step --------------------------------------------------------------------------------------------

GRADUAL = LayersConfig(rate_decay=0.5, frozen=1, unfreeze_every=1, unfreeze_warmup=2)


@functools.cache
def stepping(mesh_name, freezes=True):
    """Returns the jitted step, its batch and a fresh state on a mesh."""
    layers, mesh, optimizer = GRADUAL if freezes else LayersConfig(), mesh_named(mesh_name), AdamW(1e-2, epsilon=1e-3)
    schedule, params = WarmupConstant(0).build(1e-2, 10), train_step.abstract_params(MODEL, SHAPES)
    tx = with_layer_rates(layers, optimizer, optimizer.build(schedule, params), params)
    train = resolve_auto(tiny.get_config("gpt").train)
    with jax.set_mesh(mesh):
        step = train_step.make_train_step(MODEL, tx, schedule, train, mesh, optimizer, layers)
        abstract = train_step.abstract_state(params, tx, mesh)
        return mesh, step, put_batch(make_batch(), mesh), abstract, train_step.make_init(MODEL, tx, SHAPES, mesh)(0)


def train(mesh_name, state, steps, freezes=True):
    mesh, step, batch, *_ = stepping(mesh_name, freezes)
    with jax.set_mesh(mesh):
        for _ in range(steps):
            state, metrics = step(state, batch)
    return state, metrics


def copy(state):
    return jax.tree.map(jnp.copy, state)  # A step donates the buffers of its state.


@pytest.mark.slow
def test_on_eight_devices_and_after_a_restart_layers_are_trained_as_on_one(tmp_path):
    first, eight = stepping("1 device")[-1], "2 data 2 fsdp 2 tensor"
    alone, _ = train("1 device", copy(first), 4)
    state, _ = train(eight, copy(stepping(eight)[-1]), 2)
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    checkpoints.save(2, state, {})
    _, restored, _ = checkpoints.restore_newest(stepping(eight)[-2])
    checkpoints.close()
    whole, again = train(eight, state, 2)[0], train(eight, restored, 2)[0]
    chex.assert_trees_all_equal(jax.device_get(again), jax.device_get(whole))
    # float32 sums in another order.
    chex.assert_trees_all_close(jax.device_get(whole), jax.device_get(alone), rtol=1e-4, atol=2e-6)
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), alone.params, first.params)
    blocks = jax.tree.map(lambda new, old: np.abs(new - old), alone.params, first.params)["decoder"]["blocks"]
    assert moved["decoder"]["final_norm"]["scale"] > 0 and moved["token_embedding"]["embedding"] > 0
    assert all(x[0].max() == 0 < x[1].max() for x in jax.tree.leaves(blocks))


@pytest.mark.slow
def test_the_gradient_norm_is_that_of_what_is_trained():
    *_, state = stepping("1 device")
    norm = train("1 device", copy(state), 1)[1]["gradient_norm"]
    after, whole = train("1 device", copy(state), 1, freezes=False)
    assert whole["gradient_norm"] < 1.0  # Clipping has no effect, and Adam's mean is a tenth of the gradient.
    squares = jax.tree.map(lambda m: jnp.square(10.0 * m), after.opt_state[1].mu)
    blocks = squares.pop("decoder")
    squares |= {"norm": blocks["final_norm"], "last": jax.tree.map(lambda x: x[1], blocks["blocks"])}
    np.testing.assert_allclose(norm, np.sqrt(sum(x.sum() for x in jax.tree.leaves(squares))), rtol=1e-5)
    assert norm < whole["gradient_norm"]


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers, said",
    [
        (dict(rate_decay=0.0), r"config.layers.rate_decay is 0.0, it must be in \(0, 1\]"),
        (dict(rate_decay=1.2), r"config.layers.rate_decay is 1.2, it must be in \(0, 1\]"),
        (dict(frozen=-1), "config.layers.frozen is -1, it must be from 0 to 2, the number of blocks of a stack"),
        (dict(frozen=3), "config.layers.frozen is 3, it must be from 0 to 2"),
        (dict(unfreeze_every=-1), "config.layers.unfreeze_every is -1, it must be at least 0"),
        (dict(unfreeze_warmup=5), "config.layers.unfreeze_warmup is 5, which requires config"),
    ],
)
def test_a_field_that_cannot_be_is_named_in_one_line(layers, said):
    experiment = tiny.get_config("bert")
    experiment.layers = LayersConfig(**layers)
    with pytest.raises(UserError, match=f"^{said}"):
        validate(experiment, files=False)


def test_shared_blocks_are_one_layer_and_electra_is_refused():
    experiment = tiny.get_config("bert")
    experiment.layers, experiment.model.share_layers = LayersConfig(frozen=2), True
    with pytest.raises(UserError, match="from 0 to 1, the number of blocks of a stack, which config.model.share_lay"):
        validate(experiment, files=False)
    experiment = tiny.get_config("bert")
    experiment.layers = LayersConfig(rate_decay=0.8)
    experiment.model.replaced_token_head, experiment.model.masked_lm_head = True, False
    experiment.model.generator = Generator(num_layers=1, d_model=32, d_ff=64, num_heads=4)
    with pytest.raises(UserError, match=r"config.layers \(rate · 0.8\^\(layers above\)\) does not support config"):
        validate(experiment, files=False)


def test_parameters_that_are_trained_are_counted_and_there_are_some():
    assert count_trained(LayersConfig(frozen=1), SMALL) == 3 + 9 + 12
    assert count_trained(LayersConfig(frozen=2, frozen_embeddings=True), SMALL) == 3
    without_head = {name: SMALL[name] for name in ("decoder", "token_embedding")}
    with pytest.raises(
        UserError, match="config.layers leaves no parameter to train: the embeddings and the first 2 bl"
    ):
        count_trained(LayersConfig(frozen=2, frozen_embeddings=True), without_head)
