"""Medians, spreads and the best values of a grid, worked out by hand, and the best checkpoint of each run."""

import json

import pytest

from pretrainax.checkpoints.best import best_checkpoint
from pretrainax.config.grid import grid_of
from pretrainax.runs.grid_results import Comparison, Result, result_of
from tests.support import tiny


def compared(figures, sweeps, seeds=3, metric="loss"):
    """A comparison of runs whose figures are given seed by seed; None is of one that failed."""
    experiment = tiny.get_config("bert")
    experiment.data.source.path, experiment.evaluate.select_by = ".", metric
    runs = grid_of(experiment, seeds, sweeps)
    results = [
        Result(run, 1) if value is None else Result(run, 0, 10, value, {metric: value})
        for run, value in zip(runs, figures, strict=True)
    ]
    return Comparison(results)


RATES = ["optimizer.learning_rate=1e-5,3e-5,1e-4"]


def test_the_best_median_wins_whatever_a_single_run_has():
    # by seed: of 1e-5 4, 4.5, 5; of 3e-5 3, 3.5, 4; of 1e-4 2, 6, 7
    found = compared([4, 3, 2, 4.5, 3.5, 6, 5, 4, 7], RATES)
    assert [(group.median, group.spread) for group in found.groups] == [
        (4.5, 0.5),
        (3.5, 0.5),
        (6, pytest.approx(7**0.5)),
    ]
    assert found.best_group.values == {"optimizer.learning_rate": "3e-5"} and found.edges == []
    assert "best: optimizer.learning_rate=3e-5, median 3.5000" in found.table("runs")


def test_of_an_accuracy_more_is_better_and_the_best_at_the_edge_is_a_warning():
    found = compared([0.1, 0.2, 0.3], RATES, seeds=1, metric="accuracy")
    assert found.best_group.values == {"optimizer.learning_rate": "1e-4"}
    assert found.edges == [
        "1e-4 is the highest optimizer.learning_rate of the grid; the best may be higher: extend --sweep"
    ]
    assert f"WARNING: {found.edges[0]}" in found.table("runs") and "higher is better" in found.table("runs")
    assert found.groups[0].spread is None
    (line,) = compared([0.3, 0.2, 0.1], RATES, seeds=1, metric="accuracy").edges
    assert line.startswith("1e-5 is the lowest")


def test_each_field_has_its_own_edge_and_what_is_no_number_has_none():
    found = compared([3, 4, 1, 5, 6, 7], [*RATES, "optimizer=AdamW(),Lion()"], seeds=None)
    assert found.best_group.values == {"optimizer.learning_rate": "3e-5", "optimizer": "AdamW()"} and found.edges == []


def test_a_run_that_failed_counts_as_worse_than_any():
    found = compared([3, 1, 3, 1, 3, None, 3, None], ["optimizer.learning_rate=1e-3,1"], seeds=4)
    assert [group.median for group in found.groups] == [3, None]  # between 1 and what has failed
    assert found.best_group.values == {"optimizer.learning_rate": "1e-3"}
    lost = "learning_rate=1,seed-2 (exit code 1), learning_rate=1,seed-3 (exit code 1)"
    assert f"no result, counted as the worst: {lost}\n" in found.table("x")
    assert "2 of 4" in found.table("x")
    assert json.loads(json.dumps(found.to_json()))["groups"][1] == {
        "values": {"optimizer.learning_rate": "1"},
        **{"runs": 4, "with_metric": 2, "median": None, "spread": 0.0, "lowest": 1, "highest": 1},
    }


def test_a_run_that_has_not_ended_counts_nowhere():
    results = compared([3, 1, 3, 2], ["optimizer.learning_rate=1e-3,1"], seeds=2).results
    found = Comparison([*results[:2], Result(results[2].run), Result(results[3].run)])
    assert [(group.median, len(group.values_by_run)) for group in found.groups] == [(3, 1), (1, 1)]
    found = Comparison([results[0], *(Result(result.run) for result in results[1:])])
    assert found.best_group.values == {"optimizer.learning_rate": "1e-3"}
    assert [row["exit_code"] for row in found.to_json()["runs"]] == [0, None, None, None]


def test_seeds_alone_have_a_median_and_nothing_that_won():
    found = compared([1, 2, 4], [])
    assert found.best_group is None and found.edges == []
    content = found.to_json()
    assert [(run["run"], run["value"], run["step"]) for run in content["runs"]] == [
        ("seed-0", 1, 10),
        ("seed-1", 2, 10),
        ("seed-2", 4, 10),
    ]
    assert (content["metric"], content["best"], content["groups"][0]["median"]) == ("loss", None, 2)
    assert "runs/seed-1@best" in found.table("runs")


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
    (checkpoints / "40").mkdir()  # damaged
    assert best_checkpoint(str(checkpoints), "loss") == (20, 1.0, {"loss": 1.0})
    assert best_checkpoint(str(checkpoints), "accuracy") == (30, 0.7, {"loss": 3.0, "accuracy": 0.7})
    assert best_checkpoint(str(checkpoints), "f1") is None
    experiment = tiny.get_config("bert")
    experiment.data.source.path = str(tmp_path)
    (run,) = grid_of(experiment, 1, [])
    assert result_of(run, str(tmp_path), 0)[1:4] == (0, 20, 1.0)
    assert result_of(run, str(tmp_path), 1).value is None and result_of(run, str(tmp_path / "none"), 0).value is None
