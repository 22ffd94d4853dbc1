"""Tests that the tables of `report` have groups, percentages, settings and fields."""

import pytest

from pretrainax.reporting.runs_table import field_table, make_report, numbers, text
from tests.support.made_records import made_record, made_run


def report_of(*records, **valid):
    runs = [made_run(f"run-{i}", [3.0, 2.0], **valid) for i in range(len(records))]
    return make_report(runs, records, ["loss", "accuracy"], "step", [])


@pytest.mark.parametrize("indices, said", [([0], "1"), ([0, 1, 2, 4], "1–3, 5"), ([], ""), ([3, 2], "3–4")])
def test_numbers_are_ranges_from_one(indices, said):
    assert numbers(indices) == said


def test_an_accuracy_is_in_percent():
    assert "12.50%" in "\n".join(text(report_of(made_record(), accuracy=0.125)))


def test_each_group_has_a_heading_that_says_what_differs():
    lines = list(text(report_of(made_record(), made_record("bert"))))
    assert [line for line in lines if line.startswith("group")] == ["group A: CausalLM()", "group B: MaskedLM()"]


def test_a_long_table_of_fields_counts_the_rest():
    report = report_of(made_record(), made_record("bert"))
    rows = field_table(report, most=2)
    total = len(field_table(report, most=1000)) - 1
    assert len(rows) == 4 and rows[-1][0] == f"and {total - 2} more fields"


def test_a_long_value_is_cut():
    other = made_record()
    other.experiment.data.source.path = "x" * 500
    assert all(len(cell) < 200 for row in field_table(report_of(made_record(), other), most=9) for cell in row)
