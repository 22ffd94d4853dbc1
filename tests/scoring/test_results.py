"""Tests estimates, their tables and their files."""

import dataclasses
import json

import numpy as np
import pytest

from pretrainax.scoring.results import (
    Estimate,
    Result,
    interval_captions,
    ratio,
    ratio_difference,
    results_table,
    table_over_steps,
    with_verdicts,
    write_results,
)

COUNTS = {"documents": 2, "tokens": 3000}
RESULT = Result("other", "bits_per_byte", 1.25, 0.5, COUNTS, "left to right", "", "run", 5, (0.25, 2.25), "documents")


def test_a_ratio_divides_sums_once():
    assert ratio([1, 2, 6], [1, 1, 4]).value == 9 / 6
    assert ratio([4], [2]) == Estimate(2.0, None)


def test_the_error_of_a_ratio_with_counts_of_one_is_that_of_a_mean():
    values = np.random.default_rng(0).normal(size=50)
    assert ratio(values, np.ones(50)).standard_error == pytest.approx(values.std(ddof=1) / np.sqrt(50))


def test_the_error_of_a_ratio_is_the_deviation_that_drawing_documents_gives():
    rng, found = np.random.default_rng(1), []
    for _ in range(2000):
        counts = rng.integers(1, 100, 40)
        found.append(ratio(counts * 2 + rng.normal(0, np.sqrt(counts)), counts)[:2])
    values, errors = np.array(found).T
    assert np.mean(errors) == pytest.approx(values.std(), rel=0.06)  # 2,000 draws: 2 % error; 40 documents: bias.


def test_a_ratio_without_counts_has_no_error():
    zeros = np.zeros(3)  # Like the F1 of two taggers if no sentence has a span.
    assert ratio_difference((zeros, zeros), (zeros, zeros), np.arange(3)) == Estimate(0.0, None)
    assert ratio(zeros, zeros) == Estimate(0.0, None)


def test_a_table_has_a_line_a_result_and_says_how_it_was_counted():
    lines = results_table([RESULT, RESULT]).splitlines()
    assert lines[0] == "other" and lines[-2:] == ["left to right", "95 % intervals over documents"]
    assert lines[3].startswith("bits_per_byte  1.2500")  # A single source has no column.
    assert lines[3].split() == ["bits_per_byte", "1.2500", *"0.2500 to 2.2500 2 documents, 3,000 tokens".split()]
    assert lines[4].split() == ["bits_per_byte", "1.2500", "0.2500", "to", "2.2500"]


def test_each_kind_of_interval_names_its_metrics():
    share = dataclasses.replace(RESULT, measure="accuracy", clusters="records (Wilson)")
    mean = dataclasses.replace(RESULT, measure="mrr", clusters="records", degrees=19.0)
    others = [dataclasses.replace(share, measure="recall"), dataclasses.replace(share, interval=None, measure="f1")]
    assert interval_captions([share, mean, *others]) == [
        "accuracy, recall: 95 % intervals over records (Wilson)",
        "mrr: 95 % t intervals over records",
    ]


def test_a_table_warns_that_blocks_of_few_documents_are_not_other_documents():
    blocks = dataclasses.replace(RESULT, clusters="blocks within documents")
    assert results_table([blocks]).splitlines()[-1].endswith("other documents may differ more")


def test_a_task_that_does_not_fit_is_not_asked():
    result = Result("x", "accuracy", float("nan"), None, {"examples": 0, "not asked: too long": 3}, "cloze")
    assert results_table([result]).splitlines()[3].split()[:3] == ["accuracy", "not", "asked"]


def test_one_of_a_kind_is_said_as_one():
    one, none = (dataclasses.replace(RESULT, counts={"documents": n}) for n in (1, 0))
    assert results_table([one]).splitlines()[3].split()[-2:] == ["1", "document"]
    assert results_table([none]).splitlines()[3].split()[-2:] == ["0", "documents"]


def test_a_table_over_steps_has_a_line_a_checkpoint():
    other = Result("other", "perplexity", 9.0, None, {}, "left to right", step=5)
    later = Result("other", "bits_per_byte", 1.0, 0.1, {}, "left to right", step=1000, interval=(0.8, 1.2))
    lines = table_over_steps([RESULT, other, later]).splitlines()
    assert lines[2].split() == ["step", "bits_per_byte", "perplexity"]
    assert lines[3].split() == ["5", "1.2500", "(0.2500", "to", "2.2500)", "9.0000"]
    assert lines[4].split() == ["1,000", "1.0000", "(0.8000", "to", "1.2000)"]


def difference(value, error, degrees=9.0) -> Result:
    return dataclasses.replace(
        RESULT, measure="bits_per_byte_difference", value=value, standard_error=error, degrees=degrees
    )


def test_a_difference_is_distinguishable_only_after_holms_correction():
    """The two-sided p-values of t = 6, 2.5 and 1 with 9 degrees of freedom are 0.0002, 0.034 and 0.34."""
    results = [RESULT, *(difference(t, 1.0) for t in (2.5, 6.0, 1.0))]
    assert [r.note.partition(" (")[0] for r in with_verdicts(results)] == [
        *("", "not distinguishable", "distinguishable", "not distinguishable")
    ]
    assert with_verdicts([difference(2.5, 1.0)])[0].note == "distinguishable"  # without other comparisons
    assert "3 comparisons" in results_table(with_verdicts(results))


def test_verdicts_of_equal_models_are_rarely_wrong():
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(400):
        estimates = [ratio(rng.normal(size=6), np.ones(6)) for _ in range(5)]
        results = [dataclasses.replace(difference(0, 0), **estimate._asdict()) for estimate in estimates]
        wrong += any(r.note.startswith("distinguishable") for r in with_verdicts(results))
    assert wrong / 400 < 0.08  # 5 % plus three standard errors of 400 draws.


def test_results_are_written_as_json_and_say_when_they_replace_others(tmp_path):
    path = str(tmp_path / "evaluations" / "x.json")
    infinite = Result("other", "perplexity", float("inf"), float("nan"), {}, "")
    assert write_results(path, [RESULT, infinite]) == f"2 results in {path}"
    first, second = json.loads((tmp_path / "evaluations" / "x.json").read_text())
    assert first == {
        **{"source": "other", "part": "", "measure": "bits_per_byte", "value": 1.25, "standard_error": 0.5},
        **{"counts": {"documents": 2, "tokens": 3000}, "how": "left to right", "origin": "run", "step": 5},
        **{"interval": [0.25, 2.25], "clusters": "documents", "degrees": None, "note": ""},
    }
    assert second["value"] is None and second["standard_error"] is None
    assert write_results(path, [RESULT]) == f"1 result in {path}, replacing the previous file"
