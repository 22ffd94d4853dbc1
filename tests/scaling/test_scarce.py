"""Tests `plan --corpus`: size, epochs and weight decay follow the published settings, and FLOPs limit them."""

import math

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.scaling.budget import Budget, report, values
from pretrainax.scaling.compute_optimal import Space
from pretrainax.scaling.power_laws import law_of
from pretrainax.scaling.scarce import (
    BYTES_PER_TOKEN,
    EPOCHS,
    WEIGHT_DECAY,
    best_size,
    epochs_of,
    make_scarce_plan,
    parse_bytes,
    tokens_of,
)

LAW = law_of("muennighoff")

# Each row has (M parameters, M tokens, epochs, weight decay). The source is marin-community/marin@0b383ae64cfc, lines
# 33 to 48 of experiments/data_efficiency/convex_certificate_scaling.py; 800 steps are 200 M tokens (line 6).
SETTINGS = [
    *[(150, 200, 16, 0.8), (300, 200, 16, 1.6), (600, 200, 8, 3.2), (1400, 200, 8, 3.2)],
    *[(150, 400, 32, 0.8), (300, 400, 16, 0.8), (600, 400, 8, 1.6), (1400, 400, 8, 3.2)],
    *[(150, 800, 64, 0.4), (300, 800, 16, 0.4), (600, 800, 16, 0.4), (1400, 800, 8, 1.6)],
    *[(150, 1600, 64, 0.1), (300, 1600, 32, 0.4), (600, 1600, 16, 0.8), (1400, 1600, 8, 0.8)],
]


@pytest.fixture(scope="module")
def space():
    return Space("decoder", 8192, 512)


@pytest.mark.parametrize("constants, column", [(EPOCHS, 2), (WEIGHT_DECAY, 3)])
def test_the_constants_are_the_least_squares_lines_through_the_published_settings(constants, column):
    ratio = np.log([row[0] / row[1] for row in SETTINGS])
    wanted = np.log([row[column] for row in SETTINGS])
    exponent, log_factor = np.polyfit(ratio, wanted, 1)
    # The constants have three digits.
    assert constants == pytest.approx((math.exp(log_factor), exponent), rel=5e-3)
    errors = wanted - math.log(constants[0]) - constants[1] * ratio
    assert math.exp(np.sqrt(np.mean(errors**2))) < 1.45


def test_the_law_of_repeated_text_agrees_with_the_authors_code():
    """Tests values of huggingface/datablations@1370131:README.md, lines 300 to 326, below the size for this text."""
    a, b, e, alpha, repetition = 6.255414, 7.3049974, 0.6254804, 0.3526596, 15.387756
    n, d, u = 1e8, 4e10, 5e9
    repeated = u + u * repetition * (1 - np.exp(-(d / u - 1) / repetition))
    assert LAW.loss(n, d, d / u) == pytest.approx(np.exp(e) + np.exp(a) / n**alpha + np.exp(b) / repeated**alpha)


@pytest.mark.parametrize("flops", [None, 1e15, 3e16, 1e18])
def test_the_plan_has_the_lowest_loss_of_all_sizes_and_keeps_the_limit(space, flops):
    text = 1e8
    best = best_size(space, LAW, text, flops)
    sizes = best * np.array([0.5, 0.8, 1.0, 1.25, 2.0])
    epochs = epochs_of(sizes, space.cost(LAW, sizes), text, flops)
    losses = LAW.loss(sizes, epochs * text, np.maximum(epochs, 1.0))
    assert np.argmin(losses) == 2
    plan = make_scarce_plan(space, LAW, text, flops)
    # The number of steps is rounded, so there may be one update more.
    assert plan.run.flops <= (flops or math.inf) * (1 + 1 / plan.run.steps)
    assert plan.run.tokens == pytest.approx(plan.epochs * text, rel=1 / plan.run.steps)


def test_more_flops_mean_a_larger_model_until_the_text_is_the_limit(space):
    plans = [make_scarce_plan(space, LAW, 1e8, flops) for flops in (1e14, 1e16, 1e19, 1e20)]
    sizes = [plan.run.size for plan in plans]
    assert sizes[0] < sizes[1] < sizes[2] == sizes[3] == make_scarce_plan(space, LAW, 1e8).run.size
    assert plans[0].epochs < 1 < plans[1].epochs
    assert (plans[0].weight_decay, plans[0].dropout_rate) == (0.1, 0.0)
    assert plans[2].weight_decay > 1 and plans[2].dropout_rate == 0.1


def test_a_run_that_ends_long_before_it_overfits_has_no_dropout_and_less_weight_decay(space):
    longest = make_scarce_plan(space, LAW, 1e8)
    short = make_scarce_plan(space, LAW, 1e8, longest.run.flops / 10)
    assert (longest.share, longest.dropout_rate) == (pytest.approx(1.0), 0.1)
    assert short.epochs > 4 and short.share < 0.5 and short.dropout_rate == 0
    ratio = short.run.size / short.text
    assert 0.1 < short.weight_decay < WEIGHT_DECAY[0] * ratio ** WEIGHT_DECAY[1]


def test_enough_text_gives_nearly_the_plan_without_a_corpus():
    with_corpus, without = values(Budget(flops=1e19, corpus="1TB")), values(Budget(flops=1e19, law="muennighoff"))
    # The grid of sizes has steps of 0.1 %, and the nearest model is the same.
    assert {key: with_corpus[key] for key in without if key != "budget"} == {
        key: value for key, value in without.items() if key != "budget"
    }
    assert with_corpus["epochs"] < 1


def test_the_report_has_the_flags_of_the_run():
    text = report(Budget(corpus="200MB"))
    found = values(Budget(corpus="200MB"))
    assert f"--config.optimizer.weight_decay={found['weight_decay']:.2g}" in text
    assert f"--config.train.steps={found['steps']} " in text
    assert "Windows(shuffle_documents=True)" in text and "--config.model.dropout_rate=0.1" in text
    assert "200 M different tokens or more: tune them" in text  # The text has 47 M tokens.
    assert found["epochs"] * found["text_tokens"] == pytest.approx(found["tokens"], rel=1e-3)


def test_text_becomes_tokens_by_the_size_of_the_vocabulary():
    assert tokens_of(4.21e6, 32_000) == pytest.approx(1e6)
    assert tokens_of(4.21e6, 128_000) == pytest.approx(1e6)
    between = tokens_of(1e6, 2896)  # 2,896 is halfway between 1,024 and 8,192 on a logarithmic scale.
    assert between == pytest.approx(1e6 / ((BYTES_PER_TOKEN[1024] + BYTES_PER_TOKEN[8192]) / 2), rel=1e-3)


@pytest.mark.parametrize("text, wanted", [("38MB", 38e6), ("1.5 GB", 1.5e9), ("2e3kb", 2e6), ("7B", 7.0)])
def test_amounts_of_text_have_units(text, wanted):
    assert parse_bytes(text) == wanted


@pytest.mark.parametrize(
    "budget, message",
    [
        (Budget(corpus="38"), "--corpus=38: it must be a number and a unit"),
        (Budget(corpus="0MB"), "--corpus=0MB: it must be"),
        (Budget(corpus="-1MB"), "--corpus=-1MB: it must be"),
        (Budget(corpus="38MB", tokens=1e9), "--corpus=38MB goes with --flops or --hours, or alone; got --tokens=1e"),
        (Budget(corpus="38MB", flops=1e9, hours=1.0), "or alone; got --flops=1e.09 --hours=1"),
        (Budget(corpus="38MB", flops=0.0), "the budget must be above 0"),
        (Budget(corpus="38MB", hours=1.0), "needs a --topology"),
        (Budget(corpus="38MB", law="hoffmann"), "no term for repeated text, which --corpus needs"),
        (Budget(corpus="38MB", family="encoder"), "--law=muennighoff was measured on runs of the family decoder"),
        (Budget(corpus="1KB"), "out of range"),
    ],
)
def test_an_impossible_corpus_is_one_line(budget, message):
    with pytest.raises(UserError, match=message) as error:
        report(budget)
    assert "\n" not in str(error.value)
