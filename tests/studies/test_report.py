"""Tests the report of a study: verdict first, byte-identical output, and a page without scripts and network access."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from pretrainax.studies import report_plots
from pretrainax.studies.outcomes import Trial
from pretrainax.studies.report import build, render_html, render_json, render_markdown, write_report
from tests.support.made_studies import BITS, SPEED, made_findings, made_study, whole_study


@pytest.fixture(scope="module")
def whole():
    return whole_study()


@pytest.fixture(scope="module")
def report(whole):
    return build(*whole, plan=["30 runs, 3.0e16 FLOPs"])


@pytest.fixture(scope="module")
def page(report):
    return render_html(report)


def test_the_verdict_follows_the_question(report, page):
    question, verdict = render_markdown(report).split("\n\n")[:2]
    assert question == "# Is Muon better than AdamW for a decoder of 10 M parameters at 1e15 FLOPs?"
    assert verdict.startswith("**muon is better than adamw in bits per byte, by 0.0")
    assert page.index('<p class="verdict better">muon is better') < page.index("<h2>")


def test_the_page_has_no_scripts_and_no_addresses(page):
    assert "<script" not in page and "default-src 'none'" in page
    assert {url for url in re.findall(r"https?://[^\s\"'<]+", page)} <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink",  # names of formats, which no browser requests
    }  # fmt: skip


def test_each_picture_is_well_formed_and_shows_its_labels(page):
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 1 + 3 + 6  # 1 picture of measures, 3 of curves and 6 of fields
    texts = ["".join(ET.fromstring(picture).itertext()) for picture in pictures]
    assert "muon − adamw, primary" in texts[0] and "lion − adamw, declared" in texts[0]
    assert all("lion, 5 seeds" in text for text in texts[1:4])


def test_ids_of_different_pictures_do_not_collide(page):
    owners = [set(re.findall(r' id="((?!figure_1|patch|axes|text|line|matplotlib|xtick|ytick)[^"]+)"', picture))
              for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]  # fmt: skip
    named = [name for owner in owners for name in owner if re.match("[mp][0-9a-f]{10}", name)]
    assert len(named) == len(set(named)) > 0


def test_reports_are_equal_byte_for_byte(tmp_path, whole):
    for name in ("one", "other"):
        write_report(str(tmp_path / name), *whole)
    for ending in ("html", "md", "json"):
        assert (tmp_path / f"one/report.{ending}").read_bytes() == (tmp_path / f"other/report.{ending}").read_bytes()


def test_the_json_has_each_contrast_with_its_numbers(whole, report):
    found = json.loads(render_json(whole[0], report))
    primary, declared = found["contrasts"][:2]
    assert primary["verdict"] == "better" and primary["role"] == "primary" and primary["records"] == 300
    assert primary["interval"][0] < primary["difference"] < primary["interval"][1]
    assert list(primary["differences"]) == ["0", "1", "2", "3", "4"]
    assert declared["verdict"] == "tuning not finished" and found["verdict"] == primary["text"]


def test_the_costs_of_the_arms_are_next_to_each_other(report):
    text = render_markdown(report)
    assert "| muon | 6 | 1 | 1 | 6.0e15 | 5 | 5.0e15 | 1.1e16 | +0.00% |" in text
    assert "| lion | 7 | 1 | 0 | 7.0e15 | 5 | 5.0e15 | 1.2e16 | +9.09% |" in text


def test_the_learning_rates_of_a_measure_are_listed(whole):
    study, findings = whole
    choices = {BITS.name: {"muon": {"learning_rate": 3e-3}, "adamw": {"other": 1}}}
    text = render_markdown(build(study, findings._replace(choices=choices)))
    assert "- bits per byte: the best learning rate of muon is 0.003." in text and "rate of adamw" not in text


def test_widened_grids_and_unfinished_tuning_are_listed(report):
    text = render_markdown(report)
    assert "- lion: config.optimizer.learning_rate has 5 values; the grid of the study file has 4." in text
    assert "- lion: the tuning is not finished, the best learning rate is the largest." in text


def test_a_measure_that_cannot_decide_is_grey(report, page):
    table = next(section.table for section in report.sections if section.title == "Measures")
    assert table.grey == set() and table.rows[0][-2] == "unigram: 2.41"
    # Throughput is a time, which the report omits.
    assert not re.search(r"<tr class=grey>", page) and "throughput" not in page


def test_runs_have_their_fingerprints_and_commands(report):
    command = "python -m pretrainax.main --config=gpt2 --config.train.seed=2"
    assert f"| adamw | 2 | 800 | 1.0e15 | {7:064x} | {command} |" in render_markdown(report)


def test_changes_and_the_plan_are_listed(report):
    text = render_markdown(report)
    assert "- The seeds 3 and 4 were added after the start." in text and "- 30 runs, 3.0e16 FLOPs" in text


def test_names_cannot_break_the_page():
    arms = ["<script>$x$", "{{TITLE}}|&"]
    study = made_study(arms, 2, question="<b>{{SECTIONS}}</b>")
    page = render_html(build(study, made_findings({})))
    assert "<script" not in page and "<b>" not in page and "&lt;b&gt;{{SECTIONS}}" in page


def test_a_study_without_results_has_a_report(tmp_path):
    study = made_study(["new", "old"], 5, measures=(BITS, SPEED))
    sentence = write_report(str(tmp_path), study, made_findings({}))
    assert sentence == "Not known if new is better than old in bits per byte: 0 of 5 seeds are finished."
    assert json.loads((tmp_path / "report.json").read_text())["contrasts"][0]["difference"] is None


def test_values_of_stopped_trials_are_not_drawn():
    """Tests values of stopped trials: they belong to shorter runs.

    They also belong to another metric if a measure such as an accuracy chooses the values.
    """

    def drawn(stopped: float) -> str:
        rates = ((1e-3, 0.7, False), (2e-3, 0.8, False), (4e-3, stopped, True))
        trials = [Trial("gpt", {"rate": rate}, 0, value, 1.0, is_stopped) for rate, value, is_stopped in rates]
        return report_plots.surface(trials, "rate", {"rate": 2e-3}, "accuracy")

    assert drawn(3.2) == drawn(900.0)
