"""Estimates, their tables and their files."""

import dataclasses
import json

import numpy as np
import pytest

from pretrainax.scoring.results import Result, ratio, results_table, table_over_steps, write_results

COUNTS = {"documents": 2, "tokens": 3000}
RESULT = Result("other", "bits_per_byte", 1.25, 0.5, COUNTS, "left to right", origin="run", step=5)


def test_a_ratio_divides_sums_once():
    assert ratio([1, 2, 6], [1, 1, 4]).value == 9 / 6
    assert ratio([4], [2]) == (2.0, None)


def test_the_error_of_a_ratio_with_counts_of_one_is_that_of_a_mean():
    values = np.random.default_rng(0).normal(size=50)
    assert ratio(values, np.ones(50)).standard_error == pytest.approx(values.std(ddof=1) / np.sqrt(50))


def test_the_error_of_a_ratio_is_the_deviation_that_drawing_documents_gives():
    rng, found = np.random.default_rng(1), []
    for _ in range(2000):
        counts = rng.integers(1, 100, 40)
        found.append(ratio(counts * 2 + rng.normal(0, np.sqrt(counts)), counts))
    values, errors = np.array(found).T
    assert np.mean(errors) == pytest.approx(values.std(), rel=0.06)  # 2,000 draws: 2 % of sampling, 40 documents: bias


def test_a_table_has_a_line_a_result_and_says_how_it_was_counted():
    lines = results_table([RESULT, RESULT]).splitlines()
    assert lines[0] == "other" and lines[-1] == "left to right"
    assert lines[3].startswith("bits_per_byte  1.2500")  # without a column for the one source
    assert lines[3].split() == ["bits_per_byte", "1.2500", "0.5000", "2", "documents,", "3,000", "tokens"]
    assert lines[4].split() == ["bits_per_byte", "1.2500", "0.5000"]


def test_one_of_a_kind_is_said_as_one():
    one, none = (dataclasses.replace(RESULT, counts={"documents": n}) for n in (1, 0))
    assert results_table([one]).splitlines()[3].split()[-2:] == ["1", "document"]
    assert results_table([none]).splitlines()[3].split()[-2:] == ["0", "documents"]


def test_a_table_over_steps_has_a_line_a_checkpoint():
    other = Result("other", "perplexity", 9.0, None, {}, "left to right", step=5)
    later = Result("other", "bits_per_byte", 1.0, 0.1, {}, "left to right", step=1000)
    lines = table_over_steps([RESULT, other, later]).splitlines()
    assert lines[2].split() == ["step", "bits_per_byte", "perplexity"]
    assert lines[3].split() == ["5", "1.2500", "±", "0.5000", "9.0000"]
    assert lines[4].split() == ["1,000", "1.0000", "±", "0.1000"]


def test_results_are_written_as_json_and_say_when_they_replace_others(tmp_path):
    path = str(tmp_path / "evaluations" / "x.json")
    infinite = Result("other", "perplexity", float("inf"), float("nan"), {}, "")
    assert write_results(path, [RESULT, infinite]) == f"2 results in {path}"
    first, second = json.loads((tmp_path / "evaluations" / "x.json").read_text())
    assert first == {
        **{"source": "other", "part": "", "measure": "bits_per_byte", "value": 1.25, "standard_error": 0.5},
        **{"counts": {"documents": 2, "tokens": 3000}, "how": "left to right", "origin": "run", "step": 5},
    }
    assert second["value"] is None and second["standard_error"] is None
    assert write_results(path, [RESULT]) == f"1 results in {path}, replacing the previous file"
