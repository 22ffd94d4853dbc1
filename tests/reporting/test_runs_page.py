"""Tests that the script of report.html draws each panel, with labels at the ends of the curves, at any screen width."""

import json
import pathlib
import shutil
import subprocess

import pytest

from pretrainax.reporting.runs_page import render
from pretrainax.reporting.runs_table import make_report
from tests.support.made_records import made_record, made_run

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the script")


def charts_of(tmp_path, runs, records, width=1200):
    report = make_report(runs, records, ["loss", "accuracy"], "step", [])
    (tmp_path / "page.html").write_text(render(report, b""))
    stub = pathlib.Path(__file__).with_name("page_stub.js")
    command = ["node", str(stub), str(tmp_path / "page.html"), str(width)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def runs():
    return [made_run(name, [3.0, 2.0 + i / 100], accuracy=0.25 + i / 10) for i, name in enumerate(("small", "large"))]


@pytest.mark.parametrize("width, labels", [(1200, {"small", "large"}), (380, {"1", "2"})])
def test_curves_have_names_at_their_ends_and_numbers_on_a_phone(tmp_path, runs, width, labels):
    for chart in charts_of(tmp_path, runs, [made_record(), made_record(rate=1e-3)], width):
        assert set(chart["labels"]) == labels and chart["paths"] > 4 and chart["bad"] == 0


def test_groups_have_their_own_panels(tmp_path, runs):
    charts = charts_of(tmp_path, runs, [made_record(), made_record("bert")])
    assert [(chart["title"], chart["labels"]) for chart in charts[:2]] == [
        ("loss, nats per target; group A", ["small"]),
        ("loss, nats per target; group B", ["large"]),
    ]


def test_an_accuracy_has_an_axis_in_percent(tmp_path, runs):
    charts = charts_of(tmp_path, runs, [made_record(), made_record()])
    assert [all(tick.endswith(" %") for tick in chart["ticks"]) for chart in charts] == [False, True]


@pytest.mark.parametrize("width", [1200, 380])
def test_labels_of_fifteen_runs_do_not_overlap_also_if_lengths_differ(tmp_path, width):
    runs = [made_run(f"run-{i}", [3.0] * (2 + 2 * (i % 3)), accuracy=0.5) for i in range(15)]
    for chart in charts_of(tmp_path, runs, [made_record(seed=i) for i in range(15)], width):
        assert sorted(map(int, chart["labels"])) == list(range(1, 16))
        columns = {x: sorted(y for other, y in chart["places"] if other == x) for x, _ in chart["places"]}
        # The text has 11 px.
        assert all(b - a > 11 for ys in columns.values() for a, b in zip(ys, ys[1:], strict=False))
