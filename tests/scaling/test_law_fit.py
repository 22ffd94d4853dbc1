"""Tests fits of simulated ladders: intervals cover the known law, no ladder raises, and weak evidence is marked."""

import dataclasses
import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from pretrainax.config import UserError
from pretrainax.config.choice import import_built_in
from pretrainax.scaling.fit import MIN_RUNS, check_enough, fit_law
from pretrainax.scaling.law_fit import Problem, Pull, fit
from pretrainax.scaling.law_intervals import best_fit, intervals, prediction_interval
from pretrainax.scaling.picture import draw_law
from pretrainax.scaling.power_laws import CONSTANTS, REPETITION, LossLaw, Run
from pretrainax.scaling.prediction import Prediction
from tests.support.runs import ROOT

import_built_in()  # This declares the metrics.


def ladder(rng, count, noise, sizes=None):
    """Returns runs of a random law with random sizes and amounts of text; the first two runs have the same size."""
    alpha, beta = rng.uniform(0.2, 0.5, 2)
    n = np.resize(sizes, count) if sizes is not None else np.exp(rng.uniform(np.log(1e4), np.log(1e9), count))
    n[1] = n[0]
    d = n * np.exp(rng.uniform(np.log(2), np.log(200), count))
    a, b = (
        s * np.exp(x * np.log(v).mean()) for s, x, v in zip(rng.uniform(0.4, 2, 2), (alpha, beta), (n, d), strict=True)
    )
    law = LossLaw(rng.uniform(0.5, 3), a, alpha, b, beta, "planted", with_embeddings=False)
    losses = law.loss(n, d) * np.exp(noise * rng.standard_normal(count))
    return law, [Run(f"{i}", int(x), float(y), float(z)) for i, (x, y, z) in enumerate(zip(n, d, losses, strict=True))]


@pytest.mark.first(3)
@pytest.mark.parametrize("seed", range(300))
def test_no_ladder_raises_and_all_constants_are_finite(seed):
    rng = np.random.default_rng(seed)
    _, runs = ladder(rng, int(rng.integers(4, 13)), 10 ** rng.uniform(-5, -1))
    if len(runs) < MIN_RUNS:
        with pytest.raises(UserError, match="more runs"):
            check_enough("runs/*", runs)
        return
    check_enough("runs/*", runs)
    law = fit(runs, "decoder", "")
    found, bounds = intervals(law), prediction_interval(law, 1e10, 1e12)
    logs = [one.log_optimum(1e18) for one in (law, *found.extremes)]
    constants = [getattr(one, name) for one in (law, *found.extremes) for name in (*CONSTANTS, "exponent")]
    assert np.isfinite(logs).all() and np.isfinite(constants).all() and min(constants) > 0
    assert all(low <= high for low, high, _ in found.of.values()) and 0 < bounds[0] < bounds[1] < np.inf


# --- coverage: planted laws with 0.3 % noise --------------------------------------------------------------------------

# The laws have two scales; each has the sizes and tokens of its runs. The first law is close to Besiroglu et al., and
# the second to the ladders on a CPU.
LAWS = {
    "large": (LossLaw(1.7, 400.0, 0.34, 900.0, 0.33, "planted", False), (1e7, 1e9), (1e8, 1e10)),
    "small": (LossLaw(2.5, 60.0, 0.42, 900.0, 0.47, "planted", False), (2.5e4, 8e5), (1e6, 1.6e7)),
}
SETS = 400


def simulated(name, seed, noise=0.003, repetition=None):
    """Returns a planted law, 20 runs with noise, and a held-out run at 12 times the FLOPs of the largest run.

    With `repetition`, each size and number of tokens has runs of 1, 8 and 40 epochs.
    """
    law, sizes, tokens = LAWS[name]
    law, rng = dataclasses.replace(law, repetition=repetition), np.random.default_rng(seed)
    points = [[n, d, 1.0] for n in np.geomspace(*sizes, 5) for d in np.geomspace(*tokens, 4)]
    if repetition:
        points = [
            [n, d, e] for n in np.geomspace(*sizes, 4) for d in np.geomspace(*tokens, 3) for e in (1.0, 8.0, 40.0)
        ]
    points.append([4 * sizes[1], 3 * tokens[1], 1.0])
    losses = [law.loss(*point) * np.exp(noise * rng.standard_normal()) for point in points]
    *runs, held_out = [Run("", int(n), d, loss, e) for (n, d, e), loss in zip(points, losses, strict=True)]
    return law, runs, held_out


def covered(name, seeds, repetition=None):
    """Returns the shares of sets whose intervals contain each constant, and whose prediction contains the next run."""
    constants, predictions = [], []
    for seed in seeds:
        law, runs, held_out = simulated(name, seed, repetition=repetition)
        found = fit(runs, "decoder", "", repeats=repetition is not None)
        of = intervals(found).of
        constants.append([of[key].low <= getattr(law, key) <= of[key].high for key in of])
        low, high = prediction_interval(found, held_out.parameters, held_out.tokens)
        predictions.append(low <= held_out.loss <= high)
    return dict(zip(of, np.mean(constants, axis=0), strict=True)), np.mean(predictions)


@pytest.mark.slow
@pytest.mark.parametrize("name, repetition", [("large", None), ("small", None), ("large", 8.0)])
def test_the_intervals_of_many_sets_have_the_stated_coverage(name, repetition):
    constants, predictions = covered(name, range(SETS), repetition)
    # The standard deviations of the shares of 400 sets are 0.011 and 0.015. Most bounds are at least three of them away
    # from the stated coverage. The upper bound of the first share and the lower bound of the second are the goal.
    assert all(0.90 <= share <= 0.99 for share in constants.values()), constants
    assert 0.88 <= predictions <= 0.94


def test_the_intervals_cover_the_law_and_the_next_run():
    constants, predictions = covered("small", range(10))
    # For 10 sets, three standard deviations below 0.95 are 0.74, and three below 0.9 are 0.62.
    assert min(constants.values()) >= 0.7 and predictions >= 0.6


def test_a_prediction_interval_contains_the_noise_of_the_run():
    runs = simulated("small", 0)[1]
    law = fit(runs, "decoder", "")
    low, high = prediction_interval(law, runs[0].parameters, runs[0].tokens)
    # At a run of the ladder, the law has a smaller error than one more run. The noise alone is 1.64 standard deviations
    # on each side.
    assert np.log(high / low) > 2 * 1.64 * intervals(law).noise


# --- errors that the branches of a trunk share ------------------------------------------------------------------------


def branches(seed, correlation):
    """Returns the runs of `simulated("small", seed)`, except that runs of equal size share a trunk."""
    law, runs, held_out = simulated("small", seed)
    rng, found = np.random.default_rng([seed, 1]), []
    shared = {run.parameters: rng.standard_normal() for run in runs}
    for run in runs:
        own = np.log(run.loss / law.loss(run.parameters, run.tokens))
        noise = (1 - correlation) ** 0.5 * own + correlation**0.5 * 0.003 * shared[run.parameters]
        loss = law.loss(run.parameters, run.tokens) * np.exp(noise)
        found.append(run._replace(loss=loss, trunk=f"{run.parameters}"))
    return found, held_out


def test_shared_errors_are_estimated_and_widen_the_prediction_interval():
    runs, held_out = branches(0, 0.9)
    widths = []
    for assumed in (runs, [run._replace(trunk="") for run in runs]):
        law = fit(assumed, "decoder", "")
        low, high = prediction_interval(law, held_out.parameters, held_out.tokens)
        widths.append(np.log(high / low))
        assert (law.correlation > 0.5) == (assumed is runs)
    assert widths[0] > 1.3 * widths[1]


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_prediction_intervals_of_branches_have_nearly_the_stated_coverage(correlation):
    hits = []
    for seed in range(SETS // 2):
        runs, held_out = branches(seed, correlation)
        low, high = prediction_interval(fit(runs, "decoder", ""), held_out.parameters, held_out.tokens)
        hits.append(low <= held_out.loss <= high)
    # Five trunks determine the correlation badly. The limit 0.83 is three standard deviations (0.021 each) below 0.9.
    assert np.mean(hits) >= 0.83


# --- repeated text ----------------------------------------------------------------------------------------------------


def test_the_value_of_repeated_text_comes_back():
    law, runs, _ = simulated("large", 0, noise=0.0, repetition=8.0)
    # The optimization stops at a relative change of the cost of 1e-8.
    assert fit(runs, "decoder", "", repeats=True).repetition == pytest.approx(law.repetition, rel=1e-3)


def test_a_law_has_a_term_for_repeated_text_only_if_the_runs_determine_it():
    _, repeated, _ = simulated("large", 0, repetition=8.0)
    assert fit_law(repeated, "decoder", "").repetition == ""
    plain = fit_law(simulated("large", 0)[1], "decoder", "")
    assert plain.law.repetition is None and REPETITION not in plain.intervals.of
    assert plain.repetition == "the runs do not repeat their text, or their epochs are unknown"
    worth_as_much = [run._replace(epochs=4.0) for run in simulated("large", 0)[1]]
    assert "do not determine R*" in fit_law(worth_as_much, "decoder", "").repetition


def test_the_slope_with_a_repetition_term_is_that_of_the_prediction():
    problem, step = Problem(simulated("large", 0, repetition=8.0)[1], True), 1e-6
    t = np.array([0.5, 0.1, 0.3, -0.2, 0.4, 2.0])
    for i in range(6):
        moved = t + step * (np.arange(6) == i)
        # The difference is one-sided, so its error is about the size of the step.
        assert problem.slope(t)[:, i] == pytest.approx((problem.predict(moved) - problem.predict(t)) / step, abs=1e-5)


# --- laws without evidence --------------------------------------------------------------------------------------------


def planted(n, d, noise=0.0, seed=0):
    law = LAWS["large"][0]
    n, d = np.asarray(n, float), np.asarray(d, float)
    losses = law.loss(n, d) * np.exp(noise * np.random.default_rng(seed).standard_normal(len(n)))
    return [Run(f"{i}", int(x), float(y), float(z)) for i, (x, y, z) in enumerate(zip(n, d, losses, strict=True))]


def unidentified(runs):
    return intervals(fit(runs, "decoder", "")).unidentified


def test_a_wide_ladder_identifies_its_law():
    assert unidentified(planted(np.repeat([1e6, 1e7, 1e8], 3), np.tile([1e8, 1e9, 1e10], 3), 0.001)) == ()


@pytest.mark.parametrize("term, other", [("A / N^alpha", "B / D^beta"), ("B / D^beta", "A / N^alpha")])
def test_a_term_whose_variable_hardly_varies_is_named_with_the_runs_that_would_identify_it(term, other):
    narrow, wide = np.repeat([1.0e8, 1.02e8, 1.04e8], 3), np.tile([1e6, 1e7, 1e8], 3)
    n, d = (narrow, 10 * wide) if term.startswith("A") else (wide, narrow)
    lines = unidentified(planted(n, d, 0.003))
    (line,) = [line for line in lines if line.startswith(term)]
    assert "the runs have 100 M to 104 M" in line and "add runs below and above" in line
    assert not any(other in line for line in lines)


def test_an_asymptote_that_may_be_0_is_not_identified():
    sizes, tokens = np.repeat([1e4, 2e4, 4e4], 3), np.tile([1e6, 2e6, 4e6], 3)  # The losses are 20 to 30, and E is 1.7.
    (line,) = [line for line in unidentified(planted(sizes, tokens, 0.003)) if line.startswith("E")]
    assert "not bounded by the runs" in line and "add larger runs" in line


@pytest.mark.parametrize(
    "metric, repetition, title",
    [
        ("loss", None, "validation loss, nats per target; dashed: E"),
        ("bits_per_byte", None, "validation bits per byte; dashed: E"),
        ("bits_per_byte", 15.0, "validation bits per byte; dashed: E; curves: text without repetition"),
    ],
)
def test_the_picture_of_a_law_has_its_metric_and_its_unit(tmp_path, monkeypatch, metric, repetition, title):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda picture, *args, **kwargs: drawn.append(picture))
    runs = [Run("", n, d, 2.0) for n in (10**7, 10**8) for d in (1e9, 1e10)]
    law = LossLaw(1.7, 400.0, 0.34, 900.0, 0.33, "", metric=metric, repetition=repetition, runs=tuple(runs))
    draw_law(str(tmp_path / "law.png"), law, [law])
    assert drawn[0].axes[0].get_title(loc="left") == title


def test_the_interval_of_an_asymptote_near_0_reaches_to_the_largest_plausible_one():
    """Tests the runs of a T5, for which an earlier search stopped too early.

    It stopped at 0.9, where the cost begins to rise, although an E of 2.5 fits these runs almost as well.
    """
    content = json.loads((ROOT / "docs" / "studies" / "ladder-t5.json").read_text())
    law = fit([Run(**run) for run in content["law"]["runs"]], "encoder_decoder", "")
    found = intervals(law).of["E"]
    problem, t, variance = best_fit(law)
    starts = np.array([[np.log(found.high), *t[1:]], problem.variables(dataclasses.replace(law, E=found.high))])
    pull = Pull(np.eye(5)[[0, 0]], np.log([0.97 * found.high, 1.03 * found.high]))
    log_loss = np.tile(problem.log_loss, (2, 1))
    costs = problem.cost(problem.descend(starts, log_loss, pull), log_loss)
    threshold = problem.cost(t, problem.log_loss) + variance * stats.t.ppf(0.975, problem.freedom) ** 2 / 2
    assert costs[0] < threshold < costs[1]


def test_the_picture_of_a_law_without_evidence_is_drawn(tmp_path):
    # For alpha and beta near 0, N_opt is a power of 1 / (alpha + beta), which exceeds the range of floats.
    runs = planted([1e6, 1e6, 1e7, 1e8, 1e8, 1e8], [1e8, 1e9, 1e9, 1e9, 1e10, 1e8])
    law = LossLaw(1.0, 300.0, 0.01, 1e-6, 0.01, "", with_embeddings=False, runs=tuple(runs))
    draw_law(str(tmp_path / "law.png"), law, [law] * 5, Prediction(law, 10**9, 1e10, 2.0, (1.9, 2.1), 9.0), 2.05)
    assert (tmp_path / "law.png").read_bytes()[:4] == b"\x89PNG"
