"""Tests the moving average of the parameters: formula, sharding, validation, restoring and export."""

import contextlib
import dataclasses
import io
import json

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from pretrainax import models
from pretrainax.checkpoints.params import EMA, TRAINED, load_steps, read_params
from pretrainax.config import LearnedPositions, MeshConfig, ModelConfig, TrainConfig
from pretrainax.data.sources import TextFiles
from pretrainax.inference.load import load
from pretrainax.interop.directories import export_workdir
from pretrainax.interop.origin import find_origin
from pretrainax.layers.compute import Compute, resolve_auto
from pretrainax.optim import AdamW, WarmupConstant
from pretrainax.planning import memory
from pretrainax.runs.train import open_run, train
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.axes import AXES
from pretrainax.sharding.mesh import make_mesh
from pretrainax.training import train_step
from tests.support import tables, tiny
from tests.support.runs import arrays, lines

pytestmark = pytest.mark.slow

DECAY = 0.75

# --- the update ------------------------------------------------------------------------------------------------------

CONFIG = ModelConfig(
    vocab_size=64, num_layers=1, d_model=32, d_ff=64, num_heads=4, use_bias=False, position=LearnedPositions(16)
)
SHAPES = tables.example_shapes(CONFIG, batch_size=8)


def batch(weight):
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 16, x.shape, dtype=np.int32) for name, x in SHAPES.items()}
    return arrays | {"loss_weights": np.full(SHAPES["loss_weights"].shape, weight, np.float32)}


def updates(mesh, decay=DECAY, weights=(1.0, 1.0, 1.0)):
    """Returns the initial state and the state after each update, on batches with these loss weights."""
    devices = make_mesh(mesh, jax.devices()[: 1 if mesh.data == 1 and mesh.fsdp == 1 else 8])
    schedule, train = WarmupConstant(1).build(0.05, 10), resolve_auto(TrainConfig(ema_decay=decay))
    model = models.build(CONFIG, Compute())
    with jax.set_mesh(devices):
        # epsilon: see tests/training/test_train_step.py.
        optimizer = AdamW(epsilon=1e-3).build(schedule, train_step.abstract_params(model, SHAPES))
        state = train_step.make_init(model, optimizer, SHAPES, devices, has_ema=decay is not None)(0)
        step = train_step.make_train_step(model, optimizer, schedule, train, devices)
        states = [jax.device_get(state)]
        for weight in weights:
            state, _ = step(state, put_batch(batch(weight), devices))
            states.append(jax.device_get(state))
    return states, jax.tree.map(lambda x: x.sharding, state)


@pytest.fixture(scope="module")
def alone():
    return updates(MeshConfig(data=1))[0]


def check_means(states):
    for step in range(1, len(states)):
        weights = DECAY ** np.arange(step - 1, -1, -1.0)
        expected = jax.tree.map(lambda *x: np.average(x, 0, weights), *(s.params for s in states[1 : step + 1]))  # noqa: B023
        # The tolerance is float32 rounding; the parameters move by 0.05 in an update.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), states[step].ema, expected)


@pytest.mark.slow
def test_it_is_the_mean_of_what_each_update_left_weighted_by_powers_of_the_decay(alone):
    assert (alone[0].params["token_embedding"]["embedding"] == alone[0].ema["token_embedding"]["embedding"]).all()
    check_means(alone)


def test_training_is_what_it_is_without_one(alone):
    (*_, last), _ = updates(MeshConfig(data=1), decay=None)
    assert last.ema is None
    chex.assert_trees_all_close(alone[-1].params, last.params, rtol=2e-5, atol=2e-6)  # another program, other rounding


def test_on_eight_devices_it_is_that_of_one_and_lies_as_the_parameters_do(alone):
    states, shardings = updates(MeshConfig(data=2, fsdp=2, tensor=2))
    chex.assert_trees_all_close(states[-1].ema, alone[-1].ema, rtol=2e-5, atol=2e-6)  # sums in another order
    assert shardings.ema == shardings.params
    assert any(not sharding.is_fully_replicated for sharding in jax.tree.leaves(shardings.ema))


def test_an_update_that_is_not_made_leaves_the_parameters_for_another_step():
    states, _ = updates(MeshConfig(data=1), weights=(np.nan, 1.0, np.nan, 1.0))
    chex.assert_trees_all_equal(states[1].params, states[0].params)
    chex.assert_trees_all_equal(states[3].params, states[2].params)
    check_means(states)


# --- memory ----------------------------------------------------------------------------------------------------------


def averaging(name="gpt", decay=DECAY):
    experiment = tiny.get_config(name)
    experiment.train.ema_decay = decay
    return experiment


def test_the_plan_counts_another_copy_of_the_parameters_that_is_split_as_they_are():
    sizes = dict.fromkeys(AXES, 1) | {"fsdp": 8}
    without, found = (memory.estimate(averaging(decay=decay), sizes) for decay in (None, DECAY))
    assert found.ema == found.parameters and found.total == without.total + found.parameters
    assert dict(found.parts())["ema"] == found.ema and "ema" not in dict(without.parts())


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experiment(text, cache):
    experiment = averaging()
    experiment.data.source, experiment.data.cache_dir, experiment.mesh.data = TextFiles(str(text)), str(cache), 8
    experiment.evaluate.batches, experiment.evaluate.every, experiment.evaluate.parameters = 1, 2, "ema"
    experiment.checkpoint.every, experiment.checkpoint.keep, experiment.evaluate.average = 2, 9, 2
    experiment.schedule, experiment.train.steps = WarmupConstant(1), 6
    return experiment


@pytest.fixture(scope="module")
def run(experiment, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("averaged") / "run"
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert train(experiment, str(workdir)) == 0
    (workdir / "said.txt").write_text(said.getvalue())
    return workdir


def test_a_run_that_is_resumed_has_the_same_one_bit_for_bit(experiment, run, tmp_path):
    for steps in (3, 6):
        shorter = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, steps=steps))
        assert train(shorter, str(tmp_path)) == 0
    expected, got = arrays(run), arrays(tmp_path)
    assert any("ema" in path for path in expected) and expected.keys() == got.keys()
    assert all(got[path].tobytes() == expected[path].tobytes() for path in expected)


def test_validation_is_of_the_parameters_that_evaluate_parameters_names(experiment, run):
    (logged,) = {line["loss"] for line in lines(run, "valid") if line["step"] == 6}
    with open_run(experiment) as opened:
        steps, abstract = [str(run / "checkpoints" / "6")], opened.abstract_state.params
        losses = [opened.validate(load_steps(steps, abstract, folder))["loss"] for folder in (EMA, TRAINED)]
        both = [str(run / "checkpoints" / step) for step in ("4", "6")]
        mean = opened.validate(load_steps(both, abstract))["loss"]
    assert losses[0] == logged == json.loads((run / "checkpoints" / "6" / "run.json").read_text())["metrics"]["loss"]
    assert losses[1] != logged
    said = (run / "said.txt").read_text()
    assert "moving average of the parameters, decay 0.75; used in validation and for the best checkpoint" in said
    line = f"average of the parameters of steps 4, 6: validation loss {mean:.4f}, without averaging {logged:.4f}; "
    assert f"{line}to evaluate or export it: {run}@average2\n" in said


def test_names_of_moving_averages_and_means_give_them(run):
    found = {
        name: load(f"{run}{name}")
        for name in ("", "@6", "@ema", "@ema6", "@best", "@average2", "@trained", "@trained6")
    }
    params = {name: jax.device_get(model.params["token_embedding"]["embedding"]) for name, model in found.items()}
    for name in ("", "@6", "@ema6", "@best"):  # the loss, which is computed with the average, always decreases
        np.testing.assert_array_equal(params[name], params["@ema"])
        assert found[name].origin.endswith(", moving average of the parameters"), found[name].origin
    for name in ("@trained", "@trained6"):
        np.testing.assert_array_equal(params[name], stored(run, 6))
        assert found[name].origin == f"{run}, step 6"
    assert np.abs(params["@ema"] - params["@trained"]).max() > 1e-4
    np.testing.assert_allclose(params["@average2"], (stored(run, 4) + stored(run, 6)) / 2, rtol=1e-6)
    np.testing.assert_array_equal(params["@ema"], stored(run, 6, folder=EMA))


@pytest.mark.parametrize("which", ["@ema", "@average2", "@best", "@4", "@trained4"])
def test_an_export_is_of_what_its_name_stands_for(run, tmp_path, which):
    origin = find_origin(f"{run}{which}")
    export_workdir(str(run), str(tmp_path / "out"), origin.steps, folder=origin.folder)
    expected = {
        "@ema": stored(run, 6, folder=EMA),
        "@best": stored(run, 6, folder=EMA),
        "@4": stored(run, 4, folder=EMA),
    }
    expected["@trained4"] = stored(run, 4)
    expected["@average2"] = ((stored(run, 4).astype(np.float64) + stored(run, 6)) / 2).astype(np.float32)
    np.testing.assert_array_equal(
        load_file(tmp_path / "out" / "model.safetensors")["transformer.wte.weight"], expected[which]
    )


def stored(run, *steps, folder=TRAINED):
    """Returns the token embedding of a checkpoint."""
    blocks = read_params(*(str(run / "checkpoints" / str(step)) for step in steps), folder=folder)
    return np.concatenate([block for path, _, block in blocks if path == "token_embedding/embedding"])
