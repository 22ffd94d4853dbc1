"""Compares means, intervals and conclusions of a grid with SciPy and manual calculations; tests best checkpoints."""

import json
import statistics

import numpy as np
import pytest
from scipy import stats

from pretrainax.checkpoints.best import best_checkpoint
from pretrainax.config.grid import grid_of
from pretrainax.runs.grid_results import Comparison, Result, result_of
from tests.support import tiny


def compared(figures, sweeps, seeds=3, metric="loss", reported=None):
    """Returns a comparison of runs with the given metrics, seed by seed; None stands for a failed run.

    Args:
      reported: metrics on the half of the validation that does not select; None: the validation has no halves.
    """
    experiment = tiny.get_config("bert")
    experiment.data.source.path, experiment.evaluate.select_by = ".", metric
    experiment.evaluate.batches = 20 if reported else 1
    runs = grid_of(experiment, seeds, sweeps)
    results = []
    for run, value, other in zip(runs, figures, reported or figures, strict=True):
        metrics = {f"{metric}/half=1": value, f"{metric}/half=2": other} if reported else {metric: value}
        results.append(Result(run, 1) if value is None else Result(run, 0, 10, value, other, metrics))
    return Comparison(results)


RATES = ["optimizer.learning_rate=1e-5,3e-5,1e-4"]
# By seed: 1e-5 has 4, 4.5, 5; 3e-5 has 3, 3.5, 4.1; 1e-4 has 5, 6, 7.
CLEAR = [4, 3, 5, 4.5, 3.5, 6, 5, 4.1, 7]


def test_the_best_mean_is_the_best_if_no_paired_interval_contains_0():
    found = compared(CLEAR, RATES)
    assert [(group.to_json()["mean"], group.spread) for group in found.groups] == [
        (4.5, 0.5),
        (pytest.approx(10.6 / 3), pytest.approx(statistics.stdev([3, 3.5, 4.1]))),
        (6, 1),
    ]
    assert found.best_group.values == {"optimizer.learning_rate": "3e-5"} and found.edges == []
    # One of two comparisons is at 97.5 %, the other at 95 %. The half-widths are t quantiles of SciPy times the
    # standard error.
    differences = [np.array([1, 1, 0.9]), np.array([2, 2.5, 2.9])]
    for group, deltas, level in zip((0, 2), differences, (0.9875, 0.975), strict=True):
        width = stats.t.ppf(level, 2) * deltas.std(ddof=1) / 3**0.5
        difference = found.to_json()["groups"][group]["difference"]
        assert difference["mean"] == pytest.approx(deltas.mean()) and difference["half_width"] == pytest.approx(width)
    assert "best loss: optimizer.learning_rate=3e-5, 3.5333 ± " in found.table("runs")


def test_a_tie_has_no_best_and_says_how_many_seeds_it_takes():
    found = compared([1.0, 1.1, 1.3, 1.2, 1.1, 1.3], ["optimizer.learning_rate=1e-5,3e-5"], seeds=3)
    assert found.best_group is None and found.to_json()["best"] is None
    table = found.table("runs")
    assert "not distinguishable" in table and "no best loss: optimizer.learning_rate=1e-5 and" in table
    assert "a difference of this size takes about" in table and "\nbest" not in table


def test_a_single_seed_has_no_best_and_the_table_says_what_more_seeds_can_show():
    table = compared([1.0, 2.0], ["optimizer.learning_rate=1e-5,3e-5"], seeds=None).table("runs")
    assert "share one seed, a verdict takes at least two" in table and "\nbest" not in table


def test_the_values_of_one_half_select_and_those_of_the_other_are_reported():
    figures, reported = [1.0, 1.4, 1.1, 1.5, 1.0, 1.6], [3.0, 2.0, 3.2, 2.1, 3.1, 2.2]
    found = compared(figures, ["optimizer.learning_rate=1e-5,3e-5"], reported=reported)
    assert found.leader.values == {"optimizer.learning_rate": "1e-5"} and found.best_group is None
    content = found.to_json()
    assert (content["metric"], content["selected_by"]) == ("loss/half=2", "loss/half=1")
    assert content["groups"][0]["mean"] == pytest.approx(3.1)
    assert [(row["selection"], row["value"]) for row in content["runs"]] == list(zip(figures, reported, strict=True))
    assert "1e-5 was selected, but optimizer.learning_rate=3e-5 is better on the rows of the report" in found.table("x")


def test_a_table_without_halves_says_that_its_values_are_optimistic():
    assert "so they are optimistic" in compared(CLEAR, RATES).table("x")


def test_of_an_accuracy_more_is_better_and_the_best_mean_at_the_edge_is_a_warning():
    found = compared([0.1, 0.2, 0.3], RATES, seeds=1, metric="accuracy")
    assert found.leader.values == {"optimizer.learning_rate": "1e-4"} and found.best_group is None
    assert found.edges == [
        "optimizer.learning_rate=0.0001, of the best mean, is the highest of the grid; the best may be higher: "
        "extend --sweep"
    ]
    assert f"WARNING: {found.edges[0]}" in found.table("runs") and "higher is better" in found.table("runs")
    (line,) = compared([0.3, 0.2, 0.1], RATES, seeds=1, metric="accuracy").edges
    assert "is the lowest of the grid" in line


@pytest.mark.parametrize(
    "sweep, figures, edges",
    [
        ("optimizer=AdamW(learning_rate=1e-3),AdamW(learning_rate=3e-3)", [2, 1], ["optimizer.learning_rate=0.003"]),
        # These are not two learning rates of the same optimizer.
        ("optimizer=AdamW(learning_rate=1e-3),Lion(learning_rate=1e-4)", [2, 1], []),
        ("optimizer=AdamW(b2=0.9),AdamW(b2=0.95),AdamW(b2=0.98)", [2, 1, 3], []),
        ("optimizer.learning_rate,optimizer.b2=(1,0.9),(2,0.8),(3,0.85)", [3, 1, 2], ["optimizer.b2=0.8"]),
    ],
)
def test_edges_are_found_inside_objects_and_of_joint_fields(sweep, figures, edges):
    assert [line.partition(",")[0] for line in compared(figures, [sweep], seeds=None).edges] == edges


def test_each_field_has_its_own_edge():
    found = compared([3, 4, 1, 5, 6, 7], [*RATES, "optimizer.b2=0.98,0.99"], seeds=None)
    assert [line.partition("=")[0] for line in found.edges] == ["optimizer.b2"]


def test_a_setting_with_a_failed_run_is_not_compared():
    found = compared([3, 1, 3, 1, 3, None, 3, None], ["optimizer.learning_rate=1e-3,1"], seeds=4)
    assert found.ranking is None and found.best_group is None
    lost = "learning_rate=1,seed-2 (exit code 1), learning_rate=1,seed-3 (exit code 1)"
    assert f"no result, counted as the worst: {lost}" in found.table("x") and "2 of 4" in found.table("x")
    assert json.loads(json.dumps(found.to_json()))["groups"][1] == {
        "values": {"optimizer.learning_rate": "1"},
        **{"runs": 4, "with_metric": 2, "mean": 1, "half_width": None, "spread": 0.0, "lowest": 1, "highest": 1},
        "difference": None,
    }


def test_only_seeds_that_have_ended_in_both_settings_are_paired():
    results = compared([3, 1, 3.1, 2, 3.2, 2.5], ["optimizer.learning_rate=1e-3,1"], seeds=3).results
    found = Comparison([*results[:5], Result(results[5].run)])
    assert found.ranking.differences[0].seeds == 2
    found = Comparison([results[0], *(Result(result.run) for result in results[1:])])
    assert found.ranking is None and [row["exit_code"] for row in found.to_json()["runs"]] == [0, *[None] * 5]


def test_seeds_alone_have_a_mean_and_nothing_that_won():
    found = compared([1, 2, 4], [])
    assert found.best_group is None and found.edges == []
    content = found.to_json()
    assert [(run["run"], run["value"], run["step"]) for run in content["runs"]] == [
        ("seed-0", 1, 10),
        ("seed-1", 2, 10),
        ("seed-2", 4, 10),
    ]
    assert (content["metric"], content["best"]) == ("loss", None)
    assert content["groups"][0]["mean"] == pytest.approx(7 / 3)
    assert "runs/seed-1@best" in found.table("runs") and "2.3333 ± 3.7946" in found.table("runs")


def test_a_grid_of_which_all_failed_has_a_table_too():
    found = compared([None, None], [], seeds=2)
    assert found.best_group is None and "no result, counted" in found.table("runs")


def test_the_best_checkpoint_is_by_the_figure_of_those_that_have_it(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    for step, metrics in {
        10: {"loss": 2.0, "accuracy": 0.5},
        20: {"loss": 1.0},
        30: {"loss": 3.0, "accuracy": 0.7},
    }.items():
        (checkpoints / str(step)).mkdir(parents=True)
        content = {"step": step, "metrics": metrics, "arrays": {}, "extra": {}}
        (checkpoints / str(step) / "run.json").write_text(json.dumps(content))
    (checkpoints / "40").mkdir()  # a damaged checkpoint
    assert best_checkpoint(str(checkpoints), "loss") == (20, 1.0, {"loss": 1.0})
    assert best_checkpoint(str(checkpoints), "accuracy") == (30, 0.7, {"loss": 3.0, "accuracy": 0.7})
    assert best_checkpoint(str(checkpoints), "f1") is None
    experiment = tiny.get_config("bert")
    experiment.data.source.path = str(tmp_path)
    (run,) = grid_of(experiment, 1, [])
    assert result_of(run, str(tmp_path), 0)[1:4] == (0, 20, 1.0)
    assert result_of(run, str(tmp_path), 1).value is None and result_of(run, str(tmp_path / "none"), 0).value is None
    # This run selected the metric by its data.
    (tmp_path / "config.json").write_text(json.dumps({"evaluate": {"select_by": "accuracy"}}))
    found = result_of(run, str(tmp_path), 0)
    assert found[1:4] == (0, 30, 0.7) and Comparison([found]).metric == "accuracy"
