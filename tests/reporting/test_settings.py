"""Tests that a setting is called the best only if all paired differences exclude 0."""

import pytest

from pretrainax.reporting.run_groups import group_runs
from pretrainax.reporting.settings import compare, field_rows
from tests.support.made_records import made_record, made_run


def verdict(*runs):
    """Compares runs, each (seed, learning rate, losses), and returns the verdict about their only group."""
    lines = [made_run(str(i), losses) for i, (_, _, losses) in enumerate(runs)]
    records = [made_record(seed=seed, rate=rate) for seed, rate, _ in runs]
    (group,) = group_runs(lines, records)
    return compare(lines, records, group)


def test_a_setting_that_is_better_for_each_seed_is_the_best():
    losses = {1e-3: (2.0, 2.1, 2.05, 2.07), 3e-3: (1.5, 1.6, 1.57, 1.55)}
    best = verdict(*((seed, rate, [loss]) for rate in losses for seed, loss in enumerate(losses[rate])))
    assert best.best.label == "learning_rate=0.003"
    assert best.text.startswith("best loss: learning_rate=0.003, 1.5550 ± 0.0669; next: learning_rate=0.001, +0.5000 ±")


@pytest.mark.parametrize(
    "runs, reason",
    [
        (
            [(0, 1e-3, [2.0]), (1, 1e-3, [1.8]), (0, 3e-3, [1.5]), (1, 3e-3, [1.9])],
            "learning_rate=0.003 and learning_rate=0.001 are not distinguishable (",
        ),
        ([(0, 1e-3, [2.0]), (1, 1e-3, [2.1]), (0, 3e-3, [1.0])], "share one seed"),
        ([(0, 1e-3, [2.0]), (0, 3e-3, [1.0])], "share one seed"),
        ([(0, 1e-3, [2.0]), (1, 3e-3, [1.0])], "share no seed"),
        ([(0, 1e-3, [2.0]), (0, 1e-3, [2.0]), (0, 3e-3, [1.0]), (1, 3e-3, [1.0])], "share one seed"),
        ([(0, 1e-3, [2.0]), (1, 1e-3, [2.1, 1.9]), (0, 3e-3, [1.5]), (1, 3e-3, [1.6])], "different lengths (10 to 20"),
    ],
)
def test_otherwise_the_reason_is_given(runs, reason):
    result = verdict(*runs)
    assert result.best is None and result.text.startswith("no best") and reason in result.text


def test_the_second_half_of_a_validation_is_reported_and_the_first_selects():
    runs = [made_run(str(i), [1.0], **{"loss/half=1": 1.0 + i // 2, "loss/half=2": 5.0 + i}) for i in range(4)]
    records = [made_record(seed=i % 2, rate=1e-3 if i < 2 else 3e-3) for i in range(4)]
    for record in records:
        record.experiment.evaluate.halves = True
    (group,) = group_runs(runs, records)
    found = compare(runs, records, group)
    assert found.metric == "loss/half=2" and found.ranking.leader == 0
    assert [list(setting.values.values()) for setting in found.settings] == [[5, 6], [7, 8]]


def test_one_setting_needs_no_verdict():
    assert verdict((0, 1e-3, [2.0]), (1, 1e-3, [2.1])).text == ""


def test_a_larger_accuracy_is_better():
    runs = [
        made_run(str(i), [1.0], accuracy=accuracy)
        for i, accuracy in enumerate((0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.7, 0.8))
    ]
    records = [made_record(seed=i % 4, rate=1e-3 if i < 4 else 3e-3) for i in range(8)]
    for record in records:
        record.experiment.evaluate.select_by = "accuracy"
    (group,) = group_runs(runs, records)
    assert compare(runs, records, group).text.startswith("best accuracy: learning_rate=0.003, 75.00% ± 9.19%")


def test_a_run_without_a_validation_prevents_a_verdict():
    runs = [made_run(str(i), [2.0]) for i in range(4)]
    runs[3] = runs[3]._replace(lines=runs[3].lines[:1])
    records = [made_record(seed=i % 2, rate=1e-3 if i < 2 else 3e-3) for i in range(4)]
    (group,) = group_runs(runs, records)
    assert compare(runs, records, group).text == "no best: 3 has no validation loss yet"


def test_fields_that_differ_have_a_path_and_the_runs_of_each_value():
    records = [made_record(rate=1e-3), made_record(rate=3e-3), made_record(rate=1e-3)]
    records[2].experiment.train.steps = 50
    assert field_rows(records) == [
        ("optimizer.learning_rate", [("0.001", [0, 2]), ("0.003", [1])]),
        ("train.steps", [("40", [0, 1]), ("50", [2])]),
    ]


@pytest.mark.parametrize("seeds, is_trivial", [((0, 1, 0, 1), True), ((0, 0, 0, 1), False)])
def test_the_seed_is_omitted_if_it_numbers_the_runs_of_each_setting(seeds, is_trivial):
    records = [made_record(seed=seed, rate=rate) for seed, rate in zip(seeds, (1e-3, 1e-3, 3e-3, 3e-3), strict=True)]
    assert ("train.seed" in dict(field_rows(records))) is not is_trivial
