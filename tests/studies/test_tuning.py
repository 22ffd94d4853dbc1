"""Tests the hyperparameter search: equal numbers of trials, widening, early stopping, and any order of results."""

import math
import random

import pytest

from pretrainax.studies.study import Tuning
from pretrainax.studies.tuning import MAX_WIDENINGS, Request, Search, search

RATE, OTHER = "optimizer.learning_rate", "optimizer.adam_learning_rate"
DEFAULTS = {"muon": {RATE: 0.02, OTHER: 3e-4}, "adamw": {RATE: 1e-3}}
BEST = {RATE: {"muon": 0.02, "adamw": 1e-3}, OTHER: {"muon": 3e-4}}


def cost(request: Request, best=BEST) -> float:
    """Returns a bowl around the best value of each field, on a logarithmic scale; early parts have the same order."""
    return sum(math.log(value / best[field][request.arm]) ** 2 for field, value in request.setting)


def run(tuning: Tuning, defaults=DEFAULTS, best=BEST, seed=None) -> tuple[Search, dict]:
    """Runs all trials, one at a time; a seed shuffles them."""
    costs, rng = {}, random.Random(seed)
    while (state := search(tuning, defaults, costs)).pending:
        request = state.pending[0] if seed is None else rng.choice(state.pending)
        costs[request] = cost(request, best)
    return state, costs


def trials(state: Search, arm: str) -> int:
    return sum(request.arm == arm for request in state.requested)


GRID = {RATE: (0.3, 1.0, 3.0), OTHER: (0.3, 1.0, 3.0)}


def test_an_arm_with_one_rate_has_as_many_trials_as_an_arm_with_two():
    state, _ = run(Tuning(GRID))
    assert trials(state, "muon") == trials(state, "adamw") == 5  # 3 values of the first rate, and 2 more of the second
    assert state.chosen == {"muon": DEFAULTS["muon"], "adamw": DEFAULTS["adamw"]} and state.unfinished == {}


@pytest.mark.parametrize("fields", [{"a": "xyz", "b": "yz"}, {"a": "xz", "b": "yz"}, {"a": "xy", "b": "yz", "c": "xz"}])
def test_arms_with_any_fields_have_as_many_trials(fields):
    """Tests refinements that equal a value of a later grid and therefore add no trial."""
    rng = random.Random(0)
    defaults = {arm: dict.fromkeys(names, 1.0) for arm, names in fields.items()}
    for _ in range(100):
        best = {field: {arm: math.exp(rng.uniform(-1.2, 1.2)) for arm in fields} for field in "xyz"}
        state, _ = run(Tuning({field: (0.5, 1.0, 2.0) for field in "xyz"}), defaults, best)
        assert len({trials(state, arm) for arm in fields}) == 1


def test_both_rates_take_their_own_best_values():
    best = {RATE: {"muon": 0.06, "adamw": 3e-3}, OTHER: {"muon": 0.9e-4}}
    state, _ = run(Tuning({RATE: (0.3, 1.0, 3.0, 9.0), OTHER: (0.1, 0.3, 1.0, 3.0)}), best=best)
    assert state.chosen == {"muon": pytest.approx({RATE: 0.06, OTHER: 0.9e-4}), "adamw": pytest.approx({RATE: 3e-3})}


def test_values_are_short_decimals():
    defaults = {"one": {RATE: 0.003}}
    state, _ = run(Tuning({RATE: (1 / 3, 1.0, 3.0)}), defaults, {RATE: {"one": 0.2}})
    values = [dict(request.setting)[RATE] for request in state.requested]
    assert values == [0.001, 0.003, 0.009, 0.027, 0.081, 0.243, 0.729] and state.unfinished == {}


def test_a_best_value_at_the_edge_widens_the_grid_of_all_arms():
    best = {RATE: {"muon": 0.02 * 27, "adamw": 1e-3}, OTHER: {"muon": 3e-4}}
    state, _ = run(Tuning(GRID), best=best)
    # The trials are 3, then x 9, x 27 and x 81 to enclose the best value, and then 2 of the other rate.
    assert trials(state, "muon") == trials(state, "adamw") == 8 and state.unfinished == {}
    assert state.chosen["muon"][RATE] == pytest.approx(0.54)


@pytest.mark.parametrize(("grid", "best"), [((1.0, 3.0, 9.0), 0.55), ((0.1, 0.3, 1.0), 1.8)])
@pytest.mark.parametrize("widen", [True, False])
def test_a_best_refinement_outside_of_the_grid_is_at_its_edge(widen, grid, best):
    """An arm without the first field tries half a step on both sides of its own value, which is an end of the grid."""
    defaults = {"two": {RATE: 1.0, OTHER: 1.0}, "one": {OTHER: 1.0}}
    values = {RATE: {"two": grid[1]}, OTHER: {"two": grid[1], "one": best}}
    state, _ = run(Tuning({RATE: grid, OTHER: grid}, widen=widen), defaults, values)
    tried = [dict(request.setting)[OTHER] for request in state.requested if request.arm == "one"]
    assert list(state.unfinished) == ([] if widen else ["one"])
    assert (min(tried) < state.chosen["one"][OTHER] < max(tried)) is widen
    assert trials(state, "one") == trials(state, "two")


@pytest.mark.parametrize("widen, count", [(True, 3 + MAX_WIDENINGS), (False, 3)])
def test_a_best_value_that_stays_at_the_edge_is_unfinished(widen, count):
    best = {RATE: {"muon": 1e-9, "adamw": 1e-3}, OTHER: {"muon": 3e-4}}
    state, _ = run(Tuning({RATE: (0.3, 1.0, 3.0)}, widen=widen), best=best)
    assert list(state.unfinished) == ["muon"] and "the smallest value of its grid" in state.unfinished["muon"]
    assert trials(state, "muon") == trials(state, "adamw") == count


def test_defaults_that_differ_by_a_factor_of_ten_end_at_the_same_value():
    best = {RATE: {"one": 1e-3, "other": 1e-3}}
    state, _ = run(Tuning({RATE: (0.1, 0.316, 1.0, 3.16, 10.0)}), {"one": {RATE: 1e-3}, "other": {RATE: 1e-2}}, best)
    one, other = (state.chosen[arm][RATE] for arm in ("one", "other"))
    assert one == 1e-3 and abs(math.log(other / one)) < math.log(3.16) / 2 and state.unfinished == {}
    assert trials(state, "one") == trials(state, "other")


def test_the_worse_half_of_a_round_stops_early_in_each_arm():
    state, costs = run(Tuning(GRID, stop_share=0.25))
    for arm in DEFAULTS:
        stopped = [request for request, is_stopped in state.requested.items() if is_stopped and request.arm == arm]
        assert len(stopped) == 2 and not any(request in costs for request in stopped)  # These are 1 of 3 and 1 of 2.
    assert state.chosen["muon"] == DEFAULTS["muon"]


def test_trials_have_all_seeds_and_interleave_the_arms():
    state = search(Tuning(GRID, seed=7, seeds=2), DEFAULTS, {})
    assert [request.arm for request in state.pending[:4]] == ["muon", "adamw"] * 2
    assert [request.seed for request in state.pending] == [7] * 6 + [8] * 6


def test_the_order_of_results_changes_nothing():
    whole, _ = run(Tuning(GRID, seeds=2, stop_share=0.5))
    for seed in range(5):
        shuffled, _ = run(Tuning(GRID, seeds=2, stop_share=0.5), seed=seed)
        assert shuffled == whole and list(shuffled.requested) == list(whole.requested)


def test_failed_trials_are_never_chosen():
    tuning, costs = Tuning({RATE: (0.3, 1.0, 3.0)}), {}
    while (state := search(tuning, DEFAULTS, costs)).pending:
        for request in state.pending:
            costs[request] = None if request.arm == "muon" or dict(request.setting)[RATE] > 1e-3 else cost(request)
    assert state.chosen["adamw"] == {RATE: 1e-3} and state.unfinished == {"muon": "all its trials failed"}
