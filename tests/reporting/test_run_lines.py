"""Tests that the curves of several runs share an axis, and that their names are short."""

from pretrainax.reporting.run_lines import RunLines, metrics_of, short_names, with_seconds


def test_seconds_add_up_over_the_steps_of_a_line_until_one_is_not_known():
    lines = [
        {"step": 10, "split": "train", "step_seconds": 2.0},
        {"step": 10, "split": "valid"},
        {"step": 14, "split": "train", "step_seconds": 0.5},
        {"step": 20, "split": "train", "step_seconds": None},
        {"step": 30, "split": "train", "step_seconds": 1.0},
    ]
    assert [line["seconds"] for line in with_seconds(lines)] == [20.0, 20.0, 22.0, None, None]


def test_names_are_as_short_as_they_tell_runs_apart():
    assert short_names(["/a/t5", "/b/bert"]) == ["t5", "bert"]
    assert short_names(["/x/a/run", "/x/b/run"]) == ["a/run", "b/run"]


def test_the_usual_figures_are_those_that_a_run_has():
    runs = [RunLines("a", [{"step": 1, "split": "train", "loss": 1.0, "accuracy": None, "learning_rate": 0.1}])]
    assert metrics_of(runs) == ["loss", "learning_rate"]
    assert metrics_of(runs, ["mfu"]) == ["mfu"]
