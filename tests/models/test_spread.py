"""Compares the spread of hidden states and predictions with NumPy, and one device with eight."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.models import spread
from pretrainax.models.heads import HEADS
from pretrainax.models.heads.classify import ClassifierOutput
from pretrainax.training import train_step
from tests.support.tiers import few
from tests.training.test_train_step import Run, mesh_named, model_config


def measured(x, segment_ids):
    (total, count) = spread.hidden_spread("spread", jnp.asarray(x), jnp.asarray(segment_ids))["spread"]
    return float(total), float(count)


def mean_distance(states):
    """Returns 1 - the mean cosine similarity of different states [n, D], pair by pair."""
    unit = states / np.linalg.norm(states, axis=1, keepdims=True)
    return 1 - np.mean([unit[i] @ unit[j] for i, j in itertools.permutations(range(len(unit)), 2)])


def test_the_spread_of_states_is_one_minus_the_mean_cosine_of_the_pairs_of_a_row():
    rng = np.random.default_rng(0)
    x, segments = rng.normal(size=(3, 7, 5)), np.ones((3, 7), int)
    segments[1, 4:] = 0  # padding
    segments[2, 3:] = 2  # The count includes a second document of the row.
    total, count = measured(x, segments)
    expected = mean_distance(x[0]) + mean_distance(x[1, :4]) + mean_distance(x[2])
    assert count == 3
    np.testing.assert_allclose(total, expected, rtol=1e-5)  # float32 rounding


def test_equal_states_have_no_spread_at_any_length_of_the_vectors():
    x = np.ones((1, 100, 1)) * np.random.default_rng(0).normal(size=(1, 1, 64)) * np.linspace(0.1, 9, 100)[:, None]
    assert measured(x, np.ones((1, 100)))[0] < 1e-5  # float32 rounding


def test_a_row_of_one_token_has_no_pair():
    assert measured(np.ones((2, 3, 4)), [[1, 0, 0], [0, 0, 0]]) == (0.0, 0.0)


def test_equal_states_in_bfloat16_are_below_the_limit():
    from pretrainax.runs.health import EQUAL_STATES

    # These are neighbouring numbers in bfloat16.
    x = 1 + 2.0**-8 * np.random.default_rng(0).integers(0, 2, (1, 50, 64))
    assert measured(jnp.asarray(x, jnp.bfloat16), np.ones((1, 50)))[0] < EQUAL_STATES / 10


def classes_spread(logits, labels, real):
    output = ClassifierOutput(jnp.asarray(logits, jnp.float32))
    batch = {"labels": jnp.asarray(labels), "segment_ids": jnp.asarray(real)[:, None].astype(int)}
    x = jnp.ones((len(labels), 1, 4))
    sums = spread.spread_sums(x, {"classify": output}, batch)
    return [tuple(map(float, sums[name])) for name in (spread.PREDICTION_SPREAD, spread.TARGET_SPREAD)]


def test_the_spread_of_predictions_counts_rows_whose_class_is_not_the_most_frequent_one():
    logits = np.eye(3)[[0, 0, 1, 2, 0, 1]]
    labels = [0, 1, 1, 1, 1, 2]
    assert classes_spread(logits, labels, [1, 1, 1, 1, 1, 0]) == [(2.0, 5.0), (1.0, 5.0)]


def test_one_answer_to_all_texts_has_no_spread():
    logits = np.tile([0.1, 0.3, 0.2], (8, 1)) + np.random.default_rng(0).normal(size=(8, 3)) * 0.01
    assert classes_spread(logits, np.arange(8) % 3, [1] * 8) == [(0.0, 8.0), (5.0, 8.0)]


def test_numbers_that_agree_to_two_decimals_are_one_answer():
    output = ClassifierOutput(jnp.asarray([[0.501], [0.499], [0.502]]), "regression")
    batch = {"label_values": jnp.asarray([[0.1], [0.9], [0.5]]), "segment_ids": jnp.ones((3, 1), int)}
    answers = HEADS["classify"].answers(output, batch)
    assert len(np.unique(answers.predictions)) == 1 and len(np.unique(answers.targets)) == 3


def evaluated(family, mesh="1 device"):
    run = Run(model_config(family), mesh)
    with jax.set_mesh(run.mesh):
        step = train_step.make_eval_step(run.model, run.train, run.mesh)
        sums, _ = step(run.init().params, run.batch())
        return jax.device_get(sums)


FAMILIES = ["encoder", "encoder_decoder", "decoder", "recurrent"]


@pytest.mark.parametrize("family", few(FAMILIES, ["encoder_decoder"]))
def test_eight_devices_measure_the_same_spread_as_one(family):
    mesh = "8 data" if family == "recurrent" else "2 data 2 sequence 2 tensor"
    one, eight = evaluated(family), evaluated(family, mesh)
    names = [name for name in one if name.endswith("spread")]
    assert {spread.HIDDEN_SPREAD, spread.PREDICTION_SPREAD, spread.TARGET_SPREAD} <= set(names)
    assert ("encoder_hidden_spread" in names) == (family == "encoder_decoder")
    for name in names:
        np.testing.assert_allclose(eight[name], one[name], rtol=1e-4, err_msg=name)  # float32 sums in another order


@pytest.mark.parametrize("family", few(FAMILIES, ["encoder"]))
def test_fresh_models_have_not_collapsed(family):
    sums = evaluated(family)
    for name in sums:
        if name.endswith("hidden_spread"):
            assert sums[name][0] / sums[name][1] > 0.1, name


def test_the_training_step_measures_no_spread():
    run = Run(model_config("decoder"))
    with jax.set_mesh(mesh_named("1 device")), jax.numpy_dtype_promotion("standard"):
        _, metrics = jax.eval_shape(run.step.jitted, run.abstract, run.batch(), None, run.step.arguments)
    assert not [name for name in metrics["sums"] if name.endswith("spread")]
