"""Tests a run with experts: the balance in its metrics, the warnings about dead experts, and exact resumption."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import MixtureOfExperts, UserError
from pretrainax.data.sources import TextFiles
from pretrainax.inference.load import load
from pretrainax.runs.train import train
from pretrainax.sharding.arrays import check_mesh
from pretrainax.sharding.axes import AXES
from pretrainax.sharding.mesh import abstract_mesh
from pretrainax.sharding.rules import tree_shardings
from pretrainax.training import expert_balance
from pretrainax.training import train as core
from pretrainax.training.metrics import add_up, summarize
from tests.support import tiny
from tests.support.runs import lines as untimed

pytestmark = pytest.mark.slow

SUMS = {
    "loss": (np.float32(6.0), np.float32(2.0)),
    "layers/decoder/0:1/expert_tokens": (np.array([[4.0, 0.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]]), np.ones(2)),
    "layers/decoder/0:1/router_entropy": (np.array([8.0, 4.0]), np.array([4.0, 4.0])),
    "layers/decoder/0:1/dropped": (np.array([2.0, 0.0]), np.array([8.0, 8.0])),
}


def test_figures_are_of_all_layers_and_of_each():
    assert expert_balance.balance_metrics(SUMS) == {
        "expert_imbalance": 1.5,
        "dead_experts": 1.0,
        "router_entropy": 1.5,
        "dropped_fraction": 0.125,
    }
    assert expert_balance.layer_balance_metrics(SUMS) == {
        "expert_imbalance/layer=decoder.0": 2.0,
        "expert_imbalance/layer=decoder.1": 1.0,
        "router_entropy/layer=decoder.0": 2.0,
        "router_entropy/layer=decoder.1": 1.0,
        "dropped_fraction/layer=decoder.0": 0.25,
        "dropped_fraction/layer=decoder.1": 0.0,
    }
    assert expert_balance.expert_loads(SUMS) == {"decoder.0": [2.0, 0.0, 1.0, 1.0], "decoder.1": [1.0] * 4}
    assert expert_balance.balance_metrics({"loss": SUMS["loss"]}) == {}


def test_layers_between_which_others_have_no_experts_keep_their_numbers():
    sums = {"layers/encoder/1:2/expert_tokens": SUMS["layers/decoder/0:1/expert_tokens"]}
    assert list(expert_balance.expert_loads(sums)) == ["encoder.1", "encoder.3"]


def test_several_batches_are_added_up_first():
    other = {name: tuple(3 * np.asarray(x) for x in pair) for name, pair in SUMS.items()}
    other["layers/decoder/0:1/expert_tokens"] = (np.array([[0.0, 4.0, 2.0, 2.0], [2.0] * 4]), np.ones(2))
    found = summarize(add_up([SUMS, other]))
    assert (found["loss"], found["expert_imbalance"], found["dead_experts"]) == (3.0, 1.0, 0.0)


@pytest.fixture(scope="module")
def experiment(text, cache):
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.mesh.data, experiment.mesh.fsdp, experiment.mesh.expert = 2, 2, 2
    experiment.model.experts = MixtureOfExperts(num_experts=4, top_k=2, d_ff=32, capacity=2.0, bias_rate=0.01)
    experiment.train.steps, experiment.train.log_every, experiment.train.remat = 6, 4, "block"
    experiment.evaluate.every, experiment.evaluate.batches = 3, 1
    experiment.checkpoint.every, experiment.checkpoint.keep = 1, 6
    return experiment


@pytest.fixture(scope="module")
def finished(experiment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "run"
    assert train(experiment, str(folder)) == 0
    return folder


def test_lines_have_the_load_of_each_expert(finished):
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["split"] == "train"]
    for line in trained:
        loads = np.array(list(line["experts"].values()))
        assert loads.shape == (2, 4)
        np.testing.assert_allclose(loads.mean(axis=1), 1.0, atol=1e-4)  # rounding in metrics.jsonl
        assert line["expert_imbalance/layer=decoder.1"] == loads[1].max()
        assert 0 < line["balance_loss"] < 0.04 and 0 <= line["dropped_fraction"] < 1
    assert all("expert_imbalance" in line and "experts" not in line for line in lines if line["split"] == "valid")
    assert (finished / "experts.png").stat().st_size > 10_000


def test_the_bias_has_moved_by_its_rate_in_each_step(finished):
    bias = np.asarray(load(finished).parameters["decoder/blocks/mlp/router/balance"])  # [L, E], after 6 steps
    assert bias.any() and np.abs(bias).max() <= 0.06 + 1e-6
    np.testing.assert_allclose(bias / 0.01, np.round(bias / 0.01), atol=1e-4)  # float32


def test_a_model_that_is_loaded_drops_nothing(finished):
    assert load(finished).experiment.model.experts.capacity is None


def test_a_resume_between_two_lines_changes_nothing(experiment, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    for step in ("5", "6"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / step)
    assert train(experiment, str(tmp_path / "run")) == 0
    assert untimed(tmp_path / "run") == untimed(finished)


@pytest.mark.slow
def test_experts_that_die_are_said_once(monkeypatch, capsys, experiment, tmp_path):
    monkeypatch.setattr(core, "finish", lambda *_: None)
    figures = expert_balance.balance_metrics
    monkeypatch.setattr(expert_balance, "balance_metrics", lambda sums: figures(sums) | {"dead_experts": 3.0})
    assert train(experiment, str(tmp_path)) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "got no token" in line]
    assert len(said) == 1 and said[0].startswith("3 experts got no token in the steps up to 4, so they learn nothing")


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"top_k": 5},
            r"experts\.top_k is 5, it must be at most config\.model\.experts\.num_experts, 4",
        ),
        (
            {"capacity": 0.5},
            r"experts\.capacity is 0\.5, .* must be at least 1, such as 1\.25; None drops no",
        ),
        ({"num_experts": 0, "top_k": 0}, r"num_experts is 0, it must be at least 1; .*top_k is 0"),
        ({"d_ff": 0}, r"config\.model\.experts\.d_ff is 0, it must be at least 1"),
        ({"groups": 2}, r"groups is 2 and config\.model\.experts\.top_groups is None: set both or"),
        ({"groups": 3, "top_groups": 1}, r"num_experts 4 is not a multiple of config\.model\.experts\.groups 3"),
        ({"groups": 2, "top_groups": 3}, r"top_groups is 3, it must be at most config\.model\.experts\.groups, 2"),
        ({"top_k": 3, "groups": 2, "top_groups": 1}, r"top_k is 3, it must be at most 2: 1 groups"),
        ({"groups": 4, "top_groups": 2, "group_score": "best_two"}, r"group_score is 'best_two', which requires 2"),
        ({"first_dense": 2}, r"first_dense is 2, it must be below the number of layers, 2"),
        ({"first_dense": -1}, r"first_dense is -1, it must be at least 1"),
        ({"every": 1}, r"every is 1, it must be at least 2; None puts experts in every layer"),
        ({"every": 3}, r"every is 3, it must divide the 2 layers of the decoder"),
        ({"every": 2, "first_dense": 1}, r"every is 2 and .*\.first_dense 1, which conflict"),
        ({"dense_after": 0}, r"config\.model\.experts\.dense_after is 0, it must be at least 1"),
        ({"scale": 0.0}, r"experts\.scale is 0\.0, it must be above 0"),
        ({"z_weight": -1.0}, r"config\.model\.experts\.z_weight is -1\.0, it must be at least 0"),
    ],
)
def test_settings_that_mean_nothing_are_one_line(settings, message, experiment):
    problems = MixtureOfExperts(**{"num_experts": 4, "top_k": 2} | settings).problems(experiment)
    assert re.search(message, "; ".join(problems))


def test_behind_experts_there_is_nothing_where_a_block_is_parallel(experiment):
    experiment = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, parallel=True))
    (line,) = MixtureOfExperts(dense_after=8).problems(experiment)
    assert "dense_after is 8, and with config.model.parallel a block has no sublayer after its feed-forward" in line


def mesh(**sizes):
    return abstract_mesh(dict.fromkeys(AXES, 1) | sizes, "cpu")


def test_experts_that_the_mesh_does_not_divide_are_one_line():
    kernel = jax.ShapeDtypeStruct((2, 4, 32, 30), jnp.float32)
    params = {"decoder": {"blocks": {"mlp": {"experts_up": {"kernel": kernel}}}}}
    with pytest.raises(UserError, match=r"experts\.num_experts 4 is not a multiple of config\.mesh\.expert 3"):
        tree_shardings(mesh(expert=3), params)
    with pytest.raises(UserError, match=r"config\.model\.experts\.d_ff 30 is not a multiple of config\.mesh\.tensor 4"):
        tree_shardings(mesh(tensor=4), params)


def test_an_axis_for_experts_needs_experts():
    with pytest.raises(UserError, match=r"config\.mesh\.expert is 2, and the model has no experts"):
        check_mesh(tiny.get_config("gpt"), mesh(expert=2))
