"""Counts are printed without decimals, other metrics with four decimals."""

import math
import re

import numpy as np
import pytest

from pretrainax.config import UserError, metric
from pretrainax.config.choice import import_built_in
from pretrainax.config.metric import FRACTION, METRICS, declared, metric_text, reported
from pretrainax.data.inspection.check import format_plan_value
from pretrainax.models import heads  # noqa: F401  declares its metrics
from pretrainax.scoring.results import Result, results_table, table_over_steps
from pretrainax.training import metrics  # noqa: F401  declares the metrics of all runs
from pretrainax.training.metric_labels import label_and_format

import_built_in()


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("loss_tokens", 1216.0, "1,216"),
        ("loss_tokens/source=wiki", 1e9, "1,000,000,000"),
        ("labels", 0.0, "0"),
        ("no_label", 3, "3"),
        # This metric is a mean over batches.
        ("dead_experts", 1.5, "1.5"),
        ("dead_experts", 1 / 3, "0.3333"),
        ("text_bytes", 123456789012.0, "123,456,789,012"),
        ("loss", 2.0, "2.0000"),
        ("accuracy", 1.0, "1.0000"),
        ("unknown to the registry", 3.0, "3.0000"),
        ("loss_tokens", math.nan, "nan"),
        ("loss", math.inf, "inf"),
    ],
)
def test_a_count_has_no_decimals(name, value, text):
    assert metric_text(name, value) == text


def test_every_number_of_things_is_declared_as_a_count():
    counts = re.compile(r"number of|so far|^labels |^target tokens$")
    assert {name for name, metric in METRICS.items() if counts.search(metric.meaning)} == {
        name for name, metric in METRICS.items() if metric.is_count
    }


def test_every_share_is_declared_as_a_fraction():
    shares = re.compile(
        r"\bshare\b|^fraction of|correctly|utilization|^replaced tokens|^exact_match|pairs .* correct label|"
        "other than the batch's"
    )
    assert {name for name, metric in METRICS.items() if shares.search(metric.meaning)} == {
        name for name, metric in METRICS.items() if metric.unit == FRACTION
    }


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("accuracy", 0.125, "12.50%"),
        ("accuracy/source=wiki", 1.0, "100.00%"),
        ("loss", 2.0, "2.0000"),
        ("f1", 0.5, "0.5000"),
    ],
)
def test_a_fraction_is_reported_in_percent(name, value, text):
    assert reported(name, value) == text


def test_the_loss_of_a_task_does_not_depend_on_the_tokenizer():
    assert "tokenizer" in declared("loss").depends_on
    assert declared("loss", ["labels"]).depends_on == declared("bits_per_byte").depends_on == ("objective", "text")


def test_an_undeclared_metric_compares_only_if_everything_is_equal():
    assert declared("my_metric").depends_on == ("objective", "tokenizer", "text")


def test_tables_print_counts_without_decimals():
    results = [
        Result("a source", "no_label", value, None, {"records": 7}, "", step=step)
        for value, step in ((3.0, 1), (4.0, 2))
    ]
    for table in (results_table(results), table_over_steps(results)):
        assert re.search(r"\b3\b", table) and ".0000" not in table
    label, spec = label_and_format("no_label")
    assert format(3.0, spec) == "3" and label == "no label"


@pytest.mark.parametrize("value, text", [(123456.0, "123,456"), (7, "7"), (0.25, "0.25"), (0.98765, "0.9877")])
def test_a_row_plan_prints_all_digits_of_its_counts(value, text):
    assert format_plan_value(value) == text


@pytest.mark.parametrize(
    "more, message",
    [
        ({"loss": 0.0}, "returns 'loss', a name of the run or of another callback: choose another name"),
        ({"step": 7}, "returns 'step', a name of the run or of another callback: choose another name"),
        ({"mine": "good"}, "returns 'mine': 'good', it must be a number or a dict of numbers"),
        ({"mine": np.ones(2)}, r"returns 'mine': array\(\[1., 1.\]\), it must be a number"),
        (None, "returns None, it must return a dict of metrics"),
    ],
)
def test_a_metric_of_a_callback_that_would_replace_another_or_is_no_number_is_one_line(more, message):
    with pytest.raises(UserError, match=f"callback Mine.log_metrics {message}"):
        metric.with_metrics({"loss": 3.0}, more, "Mine.log_metrics")


def test_metrics_of_callbacks_are_added_and_their_standard_errors_merged():
    line = {"loss": 3.0, metric.STANDARD_ERRORS: {"loss": 0.1}}
    more = {"mine": np.float32(2), "all": {"a": [1]}, metric.STANDARD_ERRORS: {"mine": 0.2}}
    expected = {"loss": 3.0, "mine": 2.0, "all": {"a": [1]}, metric.STANDARD_ERRORS: {"loss": 0.1, "mine": 0.2}}
    assert metric.with_metrics(line, more, "") == expected
    assert metric.with_metrics({"loss": 3.0}, {}, "") == {"loss": 3.0}
