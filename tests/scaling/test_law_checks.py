"""Tests that laws of a wrong form are rejected, and that planted laws of the right form are accepted."""

import json

import numpy as np
import pytest

from pretrainax.scaling.fit import fit_law, law_json
from pretrainax.scaling.law_checks import form_problems, smaller_windows
from pretrainax.scaling.law_fit import fit
from pretrainax.scaling.law_intervals import prediction_interval
from pretrainax.scaling.power_laws import LossLaw, Run
from tests.support.runs import ROOT

# (parameters, tokens)
HELD_OUT = {"gpt": (1_237_440, 15_999_360), "gpt-muon": (595_072, 22_000_160), "bert": (1_051_200, 16_000_960)}
LAW = LossLaw(2.5, 60.0, 0.42, 900.0, 0.47, "planted", False)


def runs_of(loss, rng, seeds=2, noise=0.003):
    """Returns runs of five sizes, four amounts of text and several seeds; `loss` is a function of (N, D)."""
    points = [(int(n), d) for n in np.geomspace(2.5e4, 8e5, 5) for d in np.geomspace(1e6, 1.6e7, 4)]
    return [Run("", n, d, loss(n, d) * np.exp(noise * rng.standard_normal())) for _ in range(seeds) for n, d in points]


def problems(runs):
    return list(form_problems(fit(runs, "decoder", "")))


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_planted_laws_are_refused(seeds):
    """Tests levels of 0.1 % for the test and 1 % for the prediction: 5 or more of 50 laws fail with p = 0.0003."""
    found = [problems(runs_of(LAW.loss, np.random.default_rng(seed), seeds)) for seed in range(50)]
    assert sum(map(bool, found)) < 5


def coupled(n, d):
    """Computes a loss with which small models learn less from more text, as in Kaplan et al. 2020, equation 1.5."""
    return ((8e5 / n) ** 0.6 + (1.6e7 / d) ** 0.9) ** 0.2 * 2.0


def test_another_law_is_refused_with_and_without_seeds():
    rng = np.random.default_rng(0)
    lack, prediction = problems(runs_of(coupled, rng))
    assert "equal runs with other seeds by" in lack and "1/8 of the FLOPs predicts" in prediction
    (prediction,) = problems(runs_of(coupled, rng, seeds=1))
    assert "1/8 of the FLOPs predicts" in prediction


def test_too_few_runs_are_not_checked():
    assert problems(runs_of(coupled, np.random.default_rng(0), seeds=1)[:7]) == []


def test_smaller_windows_leave_out_small_sizes_and_short_runs_and_keep_three_of_each():
    runs = [Run("", n, d + n, 1.0) for n in (1, 2, 3, 4) for d in (1e6, 2e6, 4e6, 8e6)]
    sizes = [
        (len(x), {run.parameters for run in x}, round(min(run.tokens for run in x), -6)) for x in smaller_windows(runs)
    ]
    assert sizes == [
        (12, {1, 2, 3, 4}, 2e6),
        (12, {2, 3, 4}, 1e6),
    ]  # Three sizes and three amounts are 9 runs, which are fewer than two for each constant.
    assert smaller_windows(runs[:9]) == []


def test_small_runs_of_another_law_are_left_out():
    rng = np.random.default_rng(0)
    points = [run for run in runs_of(LAW.loss, rng) if run.parameters > 3e4]
    small = [run._replace(loss=run.loss * 0.97) for run in runs_of(LAW.loss, rng) if run.parameters <= 3e4]
    small = [run._replace(workdir=f"small-{i}") for i, run in enumerate(small)]
    found = fit_law(points + small, "decoder", "runs/*")
    assert found.law.runs == fit_law(points, "decoder", "").law.runs and not found.law.unidentified
    assert list(found.too_small) == small and law_json(found)["too_small"] == [run._asdict() for run in small]
    assert found.law.source == "fit of 32 runs of up to 800 k parameters and 16 M tokens, runs/*"
    reasons = [line for line in found.left_out if line.startswith("with all 40 runs, the runs differ from the law by")]
    assert len(reasons) == 1
    assert [line.partition(":")[0] for line in found.left_out if "too small for the law's form" in line] == [
        run.workdir for run in small
    ]


def test_a_law_that_no_window_has_is_of_all_runs_and_refused():
    found = fit_law(runs := runs_of(coupled, np.random.default_rng(0)), "decoder", "")
    assert len(found.law.runs) == len(runs) and not found.left_out
    assert len([line for line in found.law.unidentified if line.startswith("form: ")]) == 2


@pytest.mark.parametrize("name, kept", [("gpt", 24), ("gpt-muon", 18), ("bert", 24)])
def test_the_laws_of_the_published_ladders_leave_out_small_runs_and_predict_the_held_out_run(name, kept):
    content = json.loads((ROOT / "docs" / "studies" / f"ladder-{name}.json").read_text())
    runs = [Run(**run) for run in (*content["law"]["runs"], *content["law"].get("too_small", ()))]
    law = fit_law(runs, "decoder", "").law
    assert len(law.runs) == kept and [line.partition(":")[0] for line in law.unidentified] == ["E"]
    low, high = prediction_interval(law, *HELD_OUT[name])
    assert low <= content["score"]["measured"] <= high
