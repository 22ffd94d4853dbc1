"""Tests the health line of a run, its gradient norms, and its warnings of a collapse."""

import numpy as np
import pytest

from pretrainax.data.sources import TextFiles
from pretrainax.runs.health import EQUAL_STATES, collapses, health_line, stack_norms
from pretrainax.runs.train import train
from tests.golden.electra import joint
from tests.runs.test_task_baselines import fine_tuning
from tests.support.runs import lines
from tests.support.tiny import get_config

HEALTHY = {"loss": 1.0, "hidden_spread": 0.4, "prediction_spread": 0.25, "target_spread": 0.5}


def test_gradient_norms_are_grouped_by_stack():
    names = ["decoder/blocks/mlp/up/kernel", "encoder/final_norm/scale", "token_embedding/embedding"]
    names += ["decoder_position_embedding/embedding", "decoder/final_norm/scale", "unembedding/kernel"]
    norms = stack_norms(get_config("t5").model, names, np.array([9.0, 1.0, 4.0, 5.0, 16.0, 0.25], np.float32))
    assert norms == {"decoder": 5.0, "encoder": 1.0, "embeddings": 3.0, "head": 0.5}


def test_a_generator_is_a_stack_of_its_own():
    names = ["encoder/blocks/mlp/up/kernel", "generator/encoder/blocks/mlp/up/kernel", "replaced_token_head/dense/bias"]
    assert list(stack_norms(joint("all"), names, [1.0, 4.0, 9.0])) == ["encoder", "generator", "head"]


def test_the_squares_of_the_stacks_add_up_to_the_square_of_the_gradient_norm():
    squares = np.random.default_rng(0).random(4)
    names = ["encoder/a", "encoder/b", "token_embedding/embedding", "unembedding/bias"]
    norms = stack_norms(get_config("bert").model, names, squares)
    np.testing.assert_allclose(sum(x**2 for x in norms.values()), squares.sum())


def test_the_line_shows_spreads_and_norms():
    line = health_line(HEALTHY, {"encoder": 0.512, "head": 2.0})
    assert line == (
        "health: hidden spread 0.4000 · prediction spread 25.00% · target spread 50.00% · "
        "gradient norm encoder 0.51, head 2"
    )


def test_a_healthy_model_has_no_collapse():
    assert not collapses(HEALTHY, progress=1.0)


@pytest.mark.parametrize("name", ["hidden_spread", "encoder_hidden_spread", "generator_hidden_spread"])
def test_equal_states_are_a_collapse_of_their_stack(name):
    found = collapses({**HEALTHY, name: EQUAL_STATES / 2}, progress=0.1)
    assert list(found) == [name] and "config.optimizer.learning_rate" in found[name]


@pytest.mark.parametrize(
    ("spread", "targets", "progress", "collapsed"),
    [(0.0, 0.5, 0.5, True), (0.0, 0.5, 0.4, False), (0.0, 0.0, 1.0, False), (0.01, 0.5, 1.0, False)],
)
def test_one_answer_is_a_collapse_if_the_targets_vary_and_half_of_the_run_is_done(spread, targets, progress, collapsed):
    metrics = {"prediction_spread": spread, "target_spread": targets}
    assert bool(collapses(metrics, progress)) == collapsed


def trained(tmp_path, text, cache, capsys, **model):
    """Returns the log of 40 steps of a tiny BERT at a learning rate of 0.1, and the lines of its validations."""
    experiment = get_config("bert")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.optimizer.learning_rate, experiment.evaluate.every, experiment.checkpoint.every = 0.1, 20, 40
    vars(experiment.model).update(model)
    assert train(experiment, str(tmp_path)) == 0
    return capsys.readouterr().err, lines(tmp_path)


@pytest.mark.slow
def test_a_post_norm_model_with_too_high_a_learning_rate_is_reported_once_per_collapse(tmp_path, text, cache, capsys):
    log, metrics = trained(tmp_path, text, cache, capsys, norm_at="post", embedding_norm=True)
    assert log.count("equal last hidden states") == 1 and log.count("one answer everywhere") == 1
    assert log.count("health: hidden spread 0.0000") == 2
    train_lines = [line for line in metrics if line["split"] == "train"]
    for line in train_lines:  # the stacks contain all parameters
        squares = [x**2 for name, x in line.items() if name.startswith("gradient_norm/")]
        assert sum(squares) == pytest.approx(line["gradient_norm"] ** 2, rel=1e-5)
    assert max(line["hidden_spread"] for line in metrics if line["split"] == "valid") < EQUAL_STATES


@pytest.mark.slow
def test_a_classifier_with_one_answer_for_three_classes_is_reported_during_the_run_and_at_its_end(tmp_path, capsys):
    experiment = fine_tuning(tmp_path, labels=("good", "fine", "bad"))
    experiment.model.d_model, experiment.model.d_ff, experiment.optimizer.learning_rate = 16, 32, 0.1
    experiment.model.norm_at, experiment.model.embedding_norm = "post", True
    experiment.train.steps, experiment.evaluate.every, experiment.checkpoint.every = 40, 20, 40
    assert train(experiment, str(tmp_path / "run")) == 0
    log, valid = capsys.readouterr().err, [x for x in lines(tmp_path / "run") if x["split"] == "valid"]
    assert [line["prediction_spread"] for line in valid] == [0.0, 0.0]
    assert all(line["target_spread"] > 0.5 for line in valid)  # three classes of similar size
    assert log.count("health: hidden spread") == 2 and log.count("one answer everywhere") == 1
    assert log.count("WARNING: the model does not beat its baseline") == 1
