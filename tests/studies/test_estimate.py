"""Tests the estimate before a study starts: numbers of runs, hours, power, and other machines."""

from types import SimpleNamespace
from typing import cast

import pytest

from pretrainax.reporting.units import clock
from pretrainax.studies import estimate
from pretrainax.studies.jobs import Finished, Results
from pretrainax.studies.tuning import search
from tests.studies.fake_study import plan

SPEED = {
    "step_seconds": 0.5,
    "fixed_seconds": 4.0,
    "choose_seconds": 10.0,
    "measure_seconds": 1.0,
    "trial_seconds": 3.0,
    "devices": "1 x cpu",
}
SPEEDS = {"adamw": SPEED, "muon": SPEED}


def test_the_runs_are_those_of_the_search():
    started, costs = plan(), {}
    defaults = started.defaults()
    assert started.study.tuning is not None
    # An arm's default values are its best values.
    while (state := search(started.study.tuning, defaults, costs)).pending:
        costs |= {r: sum(abs(value - defaults[r.arm][field]) for field, value in r.setting) for r in state.pending}
    runs = estimate.runs_of(started.study, started.study.arms[0])
    assert 2 * runs.trials == len(state.requested) and runs.finals == 3
    stopped = sum(state.requested.values())  # These trials stop after a quarter of the budget.
    assert 2 * runs.trial_runs == len(state.requested) - 0.75 * stopped


def test_the_time_is_that_of_updates_and_of_what_each_run_adds():
    found = estimate.estimates(plan(), SPEEDS)["adamw"]
    # The terms are 3 final runs, 3 whole trials and 2 quarters of trials with 40 steps each; 8 starts; the measures'
    # choice; 3 scores of trials; and 3 final measures.
    assert found.seconds == pytest.approx(6.5 * 40 * 0.5 + 8 * 4.0 + 10.0 + 3 * 3.0 + 3 * 1.0)
    assert found.flops == pytest.approx(6.5 * 80)


def test_the_remaining_time_follows_the_measured_times_of_finished_jobs(tmp_path):
    started, seconds = plan(), estimate.estimates(plan(), SPEEDS)["adamw"].seconds
    results = Results(started, str(tmp_path))
    assert estimate.remaining_seconds(started, SPEEDS, results) == pytest.approx(2 * seconds)
    values = {"adamw": {"optimizer.learning_rate": 3e-3}, "muon": {}}
    job = results.final("adamw", 0, "train", values)
    (tmp_path / job.folder).mkdir(parents=True)
    (tmp_path / job.result).write_text('{"seconds": 48.0}')  # This is twice the estimate: 40 steps of 0.5 s, and 4 s.
    assert results.of(job)
    # The other arm has no finished job, so it uses the ratio of all arms.
    assert estimate.remaining_seconds(started, SPEEDS, results) == pytest.approx(2 * (seconds - 24.0) + 2 * seconds)


def test_trials_that_widen_a_grid_leave_the_time_of_the_final_runs():
    """Tests trials that take twice their estimate: three quarters of 40 steps of 0.5 s, 4 s, and 3 s of the measure."""
    started, trial = plan(), 0.75 * 40 * 0.5 + 4.0 + 3.0
    trials = [Finished(arm, "train", True, 2 * trial) for arm in SPEEDS for _ in range(20)]
    results = cast(Results, SimpleNamespace(finished=lambda: trials))
    estimated = estimate.estimates(started, SPEEDS)["adamw"]
    assert estimated.trial_seconds < 20 * trial and estimated.final_seconds == pytest.approx(3 * 25.0 + 10.0)
    assert estimate.remaining_seconds(started, SPEEDS, results) == pytest.approx(2 * 2 * estimated.final_seconds)
    wider = 40 * trial - 2 * estimated.seconds
    line = estimate.time_line(started, SPEEDS, results)
    assert line.endswith(f"estimated: {clock(40 * trial)}, of it {clock(wider)} for trials beyond the grids")


def test_the_report_names_the_smallest_effect_and_the_price_of_a_machine():
    started = plan(spread=0.1, margin=0.2)
    text = estimate.report(started, SPEEDS, "h100:1")
    assert "total: 10 trials and 6 final runs" in text and "hours on this machine (1 x cpu)" in text
    assert "smallest difference that 3 seeds find with 80% power at level 0.05: " in text and " nats, if " in text
    assert "power to call equal arms equivalent within 0.2 nats" in text and "on h100:1: " in text and "USD" in text
    assert "on h100:3: unknown" in estimate.report(started, SPEEDS, "h100:3")
