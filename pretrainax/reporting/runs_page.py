"""Renders report.html, which plots several runs on one HTML page with a small script and no external files."""

import base64
import html
import json
import math
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config.metric import FRACTION, METRICS, declared
from pretrainax.reporting.curves import trend_of
from pretrainax.reporting.line_styles import line_styles
from pretrainax.reporting.run_lines import AXES, RunLines
from pretrainax.reporting.runs_plot import NOISY, SMOOTHING, panel_title
from pretrainax.reporting.runs_table import Report, Table, field_table, run_table, setting_table

_TEMPLATE = pathlib.Path(__file__).with_name("overlay_page.html")
_MAX_POINTS = 400  # points per curve, few enough for a phone to draw without delay


class Live(NamedTuple):
    """The additional content of a page that updates itself during a run, for `pretrainax watch`."""

    status: Table  # a row for each run
    seconds: float  # interval between two updates
    samples: Sequence[tuple[str, str]] = ()  # (name, text) of each run that has written samples


def render(report: Report, picture: bytes, live: Optional[Live] = None) -> str:
    """Renders the page as HTML.

    Args:
      picture: a PNG image that is shown when scripts are disabled.
      live: the additional content of a live page. Its script reads the result of `update` from the relative URL "data".
    """
    meanings = [f"{name.replace('_', ' ')}: {METRICS[name].meaning}" for name in report.metrics if name in METRICS]
    explanations = [
        f"{SMOOTHING}. Curves with more than {_MAX_POINTS} points are averaged over neighboring points.",
        "k, M, B and T are 10^3, 10^6, 10^9 and 10^12.",
        *meanings,
    ]
    values = _fragments(report, live) | {
        "TITLE": html.escape(report.title),
        "EXPLANATIONS": _list(explanations),
        "PICTURE": base64.b64encode(picture).decode(),
        "DATA": json.dumps(_data(report), allow_nan=False).replace("<", "\\u003c"),  # a name cannot end the script
        "CONNECT": "'self'" if live else "'none'",
        "SECONDS": str(live.seconds if live else 0),
    }
    # A single pass, so that a placeholder in the name of a run is not replaced.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: values[match[1]], _TEMPLATE.read_text(encoding="utf-8"))


def update(report: Report, live: Live) -> str:
    """Returns the content of a live page that changes during a run, as JSON."""
    return json.dumps({"data": _data(report), "fragments": _fragments(report, live)}, allow_nan=False)


def _fragments(report: Report, live: Optional[Live]) -> dict[str, str]:
    """Renders the status of the runs, the notes, the tables and the samples as HTML."""
    colors = [style.color for style in line_styles([run.name for run in report.runs], report.settings)]
    return {
        "STATUS": _table(live.status, colors) if live else "",
        "NOTES": _list(report.notes),
        "TABLES": "".join(_tables(report, colors)),
        "SAMPLES": "".join(_samples(live)) if live else "",
    }


def _data(report: Report) -> dict:
    """Returns the axes, the panels and the curves, for the script of the page."""
    runs, styles = report.runs, line_styles([run.name for run in report.runs], report.settings)
    return {
        "by": report.by,
        "axes": [[name, axis.title] for name, axis in AXES.items() if any(run.has(axis.field) for run in runs)],
        "panels": [
            {"metric": panel.metric, "title": panel_title(report, panel), "runs": panel.runs}
            | {"isFraction": declared(panel.metric).unit == FRACTION}
            for panel in report.panels
        ],
        "runs": [
            {"name": run.name, **style._asdict(), "curves": {name: _curves(run, name) for name in report.metrics}}
            for run, style in zip(runs, styles, strict=True)
        ],
    }


def _curves(run: RunLines, figure: str) -> dict[str, dict]:
    """Returns a metric's curve in each split, as x and y values for each x-axis that the run has data for.

    A noisy training metric also gets a smoothed curve.
    """
    curves = {}
    for split in ("train", "valid"):
        axes = {by: run.curve(split, figure, by, _MAX_POINTS) for by in AXES}
        x = {by: _numbers(positions) for by, (positions, values) in axes.items() if np.isfinite(values).any()}
        if x:
            y = {by: axes[by][1] for by in x}
            points = {"x": x, "y": {by: _numbers(values) for by, values in y.items()}}
            if split == "train" and figure in NOISY:
                points["trend"] = {by: _numbers(np.where(np.isfinite(v), trend_of(v), np.nan)) for by, v in y.items()}
            curves[split] = points
    return curves


def _numbers(values: np.ndarray) -> list[Optional[float]]:
    """Rounds values to six significant digits, enough for a screen, and replaces non-finite values with None."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _list(lines) -> str:
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


def _tables(report: Report, colors: list[str]):
    """Yields the HTML of the tables: for each group its runs, settings and verdict; then the differing fields."""
    for group, verdict in zip(report.groups, report.verdicts, strict=True):
        if len(report.groups) > 1:
            yield f"<h2>Group {html.escape(group.title)}</h2>"
        yield _table(run_table(report, group), [colors[i] for i in group.runs])
        yield _table(setting_table(verdict))
        yield f"<p>{html.escape(verdict.text)}</p>" if verdict.text else ""
    yield _table(field_table(report, most=100), css="fields")


def _samples(live: Live) -> Iterator[str]:
    """Yields the HTML of the latest samples of each run."""
    for name, text in live.samples:
        yield f"<h2>Samples of {html.escape(name)}</h2><pre>{html.escape(text)}</pre>"


def _table(rows: Table, colors: Optional[list[str]] = None, css: str = "") -> str:
    """Formats a table as HTML. `colors` are the colors of the runs, if each row is a run."""
    if not rows:
        return ""
    header = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    lines = []
    for i, row in enumerate(rows[1:]):
        mark = f'<i style="background:{colors[i]}"></i>' if colors else ""
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
        lines.append(f"<tr><th>{mark}{html.escape(row[0])}</th>{cells}</tr>")
    table = f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="{f"table {css}".strip()}">{table}</div>'
