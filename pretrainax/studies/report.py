"""Builds the report of a study: its verdict, the evidence, and the costs.

The report depends only on the study file and the findings. Therefore its bytes do not depend on the order of the runs.
"""

import html
import json
import math
import os
import pathlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.tables import markdown
from pretrainax.reporting.units import large_number, scientific
from pretrainax.studies import report_plots
from pretrainax.studies.baselines import baseline_notes
from pretrainax.studies.outcomes import FinalRun, Findings
from pretrainax.studies.report_tables import Table, arm_table, contrast_table, cost_table, measure_table, run_table
from pretrainax.studies.study import Study
from pretrainax.studies.verdicts import Verdict, judge

_TEMPLATE = pathlib.Path(__file__).with_name("report_page.html")
_CURVES = ("bits_per_byte", "loss")  # the report draws the first of these metrics that all runs have
_AXES = ("tokens", "bytes", "flops")  # x-axes of the curves
_LONG = 30  # characters of a cell that may have several lines
_CURVE_NOTES = (
    "A line is the mean over seeds. A band reaches from the smallest to the largest value of a seed.",
    "Losses of different objectives or tokenizers are not comparable.",
)
_METHOD = (
    "The unit is the pretraining seed. A contrast is the mean difference over the seeds that both arms have. If it is "
    "positive, the first arm is better.",
    "Intervals cover pretraining seeds and test records (two-way), with Satterthwaite's degrees of freedom.",
    "Holm's method keeps two probabilities among the primary and declared contrasts at 5 % each: that of a false "
    "better or worse, and that of a false equivalent.",
    "Exploratory contrasts have no verdict: one in 20 of their intervals does not contain the true difference.",
    "The signal-to-noise ratio is the range of the arms' means, divided by the standard error of a mean over seeds. A "
    "measure is grey if equal arms would have this range in 5 % of cases or more (Tukey's test).",
    "The verdicts are about the arms with the values that the tuning chose. Intervals do not contain the error of this "
    "choice.",
)


class Plot(NamedTuple):
    """An SVG picture with its caption."""

    caption: str
    svg: str


class Section(NamedTuple):
    """A part of the report."""

    title: str
    notes: Sequence[str] = ()
    table: Optional[Table] = None
    plots: Sequence[Plot] = ()
    is_folded: bool = False  # closed at first on the HTML page


class Report(NamedTuple):
    """The contents of a report, before their formatting."""

    question: str
    verdicts: Sequence[Verdict]  # the first verdict is about the primary contrast
    sections: Sequence[Section]


def write_report(folder: str, study: Study, findings: Findings, plan: Sequence[str] = ()) -> str:
    """Writes report.html, report.md and report.json to a local folder; returns the sentence of the verdict.

    Args:
      plan: lines that describe the expected cost and power of the study before its start.
    """
    report = build(study, findings, plan)
    write_files(folder, "report", study, report)
    return report.verdicts[0].text


def write_files(folder: str, name: str, study: Study, report: Report) -> None:
    """Writes a report as HTML, Markdown and JSON to files with a name in a local folder."""
    os.makedirs(folder, exist_ok=True)
    contents = {"html": render_html(report), "md": render_markdown(report), "json": render_json(study, report)}
    for ending, content in contents.items():
        write_atomically(os.path.join(folder, f"{name}.{ending}"), content)


def build(study: Study, findings: Findings, plan: Sequence[str] = ()) -> Report:
    """Builds the contents of a report; arguments as in `write_report`."""
    verdicts = [verdict for verdict in judge(study, findings) if verdict.contrast.measure not in study.untested_times]
    names = {measure.name for measure in study.measures} - study.untested_times
    contrasts, measures = contrast_sections(study, findings, verdicts, names)
    sections = [
        contrasts,
        Section("Arms", list(_budget(study)), arm_table(study, findings)),
        measures,
        Section("Curves", _CURVE_NOTES if findings.runs else (), plots=list(curves_of(findings.runs, _AXES))),
        Section("Tuning", list(_tuning_notes(study, findings)), plots=list(_surfaces(study, findings))),
        Section("Costs", ["The files times.* have the times of the runs."], cost_table(study, findings)),
        Section("Plan before the start", plan),
        Section("Changes after the start", findings.changes),
        Section("Method", _METHOD),
        Section("Runs", table=run_table(findings), is_folded=True),
    ]
    return Report(study.question, verdicts, filled(sections))


def filled(sections: Sequence[Section]) -> list[Section]:
    """Returns the sections that have contents."""
    return [s for s in sections if s.plots or s.notes or (s.table and s.table.rows)]


def contrast_sections(
    study: Study, findings: Findings, verdicts: Sequence[Verdict], names: Collection[str]
) -> tuple[Section, Section]:
    """Builds the sections with the contrasts and with the values of some measures.

    Args:
      verdicts: the verdicts about these measures.
      names: names of the measures.
    """
    contrasts = Section("Contrasts", table=contrast_table(verdicts), plots=list(_forests(study, verdicts)))
    rates = [
        f"{measure}: the best learning rate of {arm} is {choice['learning_rate']:g}."
        for measure, of_arms in findings.choices.items()
        for arm, choice in of_arms.items()
        if measure in names and "learning_rate" in choice
    ]
    weak = list(baseline_notes(study, findings, names))
    return contrasts, Section("Measures", [*weak, *rates], measure_table(study, findings, names))


def _budget(study: Study) -> Iterator[str]:
    """Yields the budget and the tokenizer of the runs, and the arms without a budget."""
    names = ("tokens", "bytes", "seconds", "dollars")
    budgets = [f"{large_number(value)} {name}" for name in names if (value := getattr(study.budget, name)) is not None]
    budget = ", ".join(budgets) or f"{scientific(study.budget.flops or 0.0)} FLOPs"
    tokenizer = {"shared": "The arms share a tokenizer.", "own": "Each arm has its own tokenizer."}
    yield f"Each run has a budget of {budget}. {tokenizer[study.budget.tokenizer]}"
    if untrained := [arm.name for arm in study.arms if arm.untrained]:
        yield f"Without training, budget and trials: {', '.join(untrained)}."


def _forests(study: Study, verdicts: Sequence[Verdict]) -> Iterator[Plot]:
    for measure in study.measures:
        of_measure = [v for v in verdicts if v.contrast.measure == measure.name and v.comparison.seeds]
        if of_measure:
            margin = study.margin if measure.name == study.primary.measure else None
            yield Plot(measure.name, report_plots.forest(of_measure, measure.unit, margin))


def curves_of(runs: Sequence[FinalRun], axes: Sequence[str]) -> Iterator[Plot]:
    """Yields the curves of the first metric that all trained runs have, on some of the axes in `run_lines.AXES`."""
    runs = [run for run in runs if run.steps]
    for metric in _CURVES if runs else ():
        if found := report_plots.axes_of(runs, metric, axes):
            for axis in found:
                caption = f"validation {metric.replace('_', ' ')} by {report_plots.AXES[axis].title}"
                yield Plot(caption, report_plots.curves(runs, metric, axis))
            return


def _surfaces(study: Study, findings: Findings) -> Iterator[Plot]:
    for arm in study.arms:
        trials = [trial for trial in findings.trials if trial.arm == arm.name]
        for field in dict.fromkeys(name for trial in trials for name in trial.values):
            of_field = [trial for trial in trials if field in trial.values]
            if len({trial.values[field] for trial in of_field}) < 2:
                continue
            chosen, measure = findings.chosen.get(arm.name, {}), study.tuning.measure if study.tuning else ""
            yield Plot(f"{arm.name}: {field}", report_plots.surface(of_field, field, chosen, measure))


def _tuning_notes(study: Study, findings: Findings) -> Iterator[str]:
    """Yields the rules of the tuning, and for each arm the fields whose grids were widened."""
    if study.tuning is None:
        return
    seeds = [str(study.tuning.seed + i) for i in range(study.tuning.seeds)]
    stop = study.tuning.stop_share
    rule = f"The worse trials stop after {stop:.0%} of the budget." if stop else "No trial stops early."
    yield f"{study.tuning.measure} chooses the values, with seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}. {rule}"
    for arm in study.arms:
        for field, multiples in study.tuning.grid.items():
            values = {
                trial.values[field] for trial in findings.trials if trial.arm == arm.name and field in trial.values
            }
            if len(values) > len(multiples):
                yield f"{arm.name}: {field} has {len(values)} values; the grid of the study file has {len(multiples)}."
        if arm.name in findings.unfinished:
            yield f"{arm.name}: the tuning is not finished, {findings.unfinished[arm.name]}."


def render_markdown(report: Report) -> str:
    """Formats a report as Markdown, without its plots."""
    parts = [f"# {report.question}", f"**{report.verdicts[0].text}**"]
    for section in report.sections:
        if section.notes or section.table is not None:
            parts.append(f"## {section.title}")
            parts += ["\n".join(f"- {note}" for note in section.notes)] * bool(section.notes)
        if section.table is not None:
            rows = [[cell.replace("|", "\\|") for cell in row] for row in section.table.rows]
            parts.append(markdown(section.table.header, rows, padded=False).rstrip())
    return "\n\n".join(parts) + "\n"


def render_html(report: Report) -> str:
    """Renders a report as one HTML page without external files and without scripts."""
    verdict = report.verdicts[0]
    values = {
        "TITLE": html.escape(report.question),
        "WORD": verdict.word if verdict.is_decided else "open",
        "VERDICT": html.escape(verdict.text),
        "SECTIONS": "\n".join(map(_section, report.sections)),
    }
    # A single pass, so that a placeholder in the name of an arm is not replaced.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: values[match[1]], _TEMPLATE.read_text(encoding="utf-8"))


def _section(section: Section) -> str:
    """Renders a section as HTML."""
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    if section.notes:
        parts.append(f"<ul>{''.join(f'<li>{html.escape(note)}</li>' for note in section.notes)}</ul>")
    figures = (f"<figure><figcaption>{html.escape(p.caption)}</figcaption>{p.svg}</figure>" for p in section.plots)
    parts += [f'<div class="plots">{"".join(figures)}</div>'] * bool(section.plots)
    if section.table is not None:
        header = "".join(f"<th>{html.escape(cell)}</th>" for cell in section.table.header)
        body = ""
        for i, row in enumerate(section.table.rows):
            cells = "".join(f"<td{' class=long' * (len(x) > _LONG)}>{html.escape(x)}</td>" for x in row)
            body += f"<tr{' class=grey' * (i in section.table.grey)}>{cells}</tr>"
        parts.append(f'<div class="table"><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>')
    content = "\n".join(parts)
    return f"<details><summary>{section.title}</summary>{content}</details>" if section.is_folded else content


def render_json(study: Study, report: Report) -> str:
    """Formats the verdicts and the tables of a report as JSON; unknown numbers are null."""
    tables = {s.title: [dict(zip(s.table.header, row, strict=True)) for row in s.table.rows]
              for s in report.sections if s.table is not None}  # fmt: skip
    content = {
        "question": study.question,
        "verdict": report.verdicts[0].text,
        "contrasts": [_contrast(verdict) for verdict in report.verdicts],
        "tables": tables,
        "notes": {s.title: list(s.notes) for s in report.sections if s.notes},
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _contrast(verdict: Verdict) -> JsonObject:
    estimate, noise = verdict.comparison.estimate, verdict.comparison.noise
    numbers = {
        "difference": estimate.value,
        "standard_error": estimate.standard_error,
        "degrees": estimate.degrees,
        "p_value": estimate.p_value,
        "spread_over_seeds": None if noise is None else float(np.asarray(noise.spread)),
        "record_error": None if noise is None else float(np.asarray(noise.record_error)),
    }
    return {
        **vars(verdict.contrast),
        "role": verdict.role,
        "verdict": verdict.word,
        "text": verdict.text,
        **{name: x if x is not None and math.isfinite(x) else None for name, x in numbers.items()},
        "level": verdict.level,
        "interval": verdict.interval,
        "differences": dict(zip(map(str, verdict.comparison.seeds), verdict.comparison.differences, strict=True)),
        "unpaired_seeds": verdict.comparison.unpaired,
        "records": verdict.comparison.records,
        "more_seeds": verdict.more_seeds,
    }
