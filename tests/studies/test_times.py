"""Tests the files with the times of a study; its report has no times, so that it is equal on all machines."""

import dataclasses
import json
import re

import pytest

from pretrainax.studies.report import build, render_html, render_json, render_markdown
from pretrainax.studies.study import Contrast
from pretrainax.studies.times import RunTime, write_times
from tests.support.made_studies import BITS, SPEED, made_outcomes, whole_study


@pytest.fixture(scope="module")
def study_and_findings():
    return whole_study()


def times(findings) -> list[RunTime]:
    """Returns runs whose steps take 0.1 s."""
    found = []
    for run in findings.runs:
        lines = [line | {"seconds": 0.1 * line["step"]} for line in run.lines]
        found.append(RunTime(run._replace(lines=lines), "1 x cpu", 90.0))
    return found


def test_times_have_the_seconds_of_each_run_the_curves_and_the_measures_of_time(study_and_findings, tmp_path):
    study, findings = study_and_findings
    write_times(str(tmp_path), study, findings, times(findings))
    text, page = ((tmp_path / f"times.{ending}").read_text() for ending in ("md", "html"))
    assert "| muon | 0 | 1 x cpu | 1:30 | 1:20 |" in text
    # The pictures are the curves and the throughput.
    assert "validation loss by time in steps" in page and len(re.findall("<svg", page)) == 2
    assert re.search(r"<tr class=grey><td>throughput.*cannot decide", page)
    contrasts = json.loads((tmp_path / "times.json").read_text())["tables"]["Contrasts"]
    assert [row["contrast"] for row in contrasts] == ["muon − adamw", "lion − adamw"]


def test_the_report_does_not_depend_on_untested_times(study_and_findings):
    study, findings = study_and_findings
    slower = {arm: made_outcomes([1.0] * 5) for arm in findings.outcomes[SPEED.name]}
    for render in (render_html, render_markdown, lambda report: render_json(study, report)):
        reports = [findings, findings._replace(outcomes=findings.outcomes | {SPEED.name: slower})]
        one, other = (render(build(study, found)) for found in reports)
        assert one == other and SPEED.name not in one


def test_a_tested_time_is_in_the_report(study_and_findings, tmp_path):
    study, findings = study_and_findings
    declared = (Contrast(SPEED.name, "muon", "adamw"), Contrast(BITS.name, "lion", "adamw"))
    study = dataclasses.replace(study, declared=declared)
    text = render_markdown(build(study, findings))
    assert "| throughput | muon − adamw | declared |" in text
    write_times(str(tmp_path), study, findings, times(findings))
    assert "Measures" not in json.loads((tmp_path / "times.json").read_text())["tables"]
