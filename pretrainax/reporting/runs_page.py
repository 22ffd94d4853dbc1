"""Renders report.html, which plots several runs on one HTML page with a small script and no external files."""

import base64
import html
import itertools
import json
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Optional

import numpy as np

from pretrainax.config.metric import METRICS
from pretrainax.reporting.curves import trend_of
from pretrainax.reporting.run_lines import AXES, SECONDS, RunLines
from pretrainax.reporting.runs_plot import COLORS, NOISY, SMOOTHING, title_of
from pretrainax.reporting.units import elapsed, large_number

_TEMPLATE = pathlib.Path(__file__).with_name("overlay_page.html")
_MAX_POINTS = 400  # points per curve, few enough for a phone to draw without delay


def render(runs: Sequence[RunLines], figures: Sequence[str], by: str, notes: Sequence[str], picture: bytes) -> str:
    """Renders the page as HTML.

    Args:
      figures: names of the metrics to plot.
      by: name in AXES of the x-axis that is selected when the page opens.
      notes: lines about missing data.
      picture: a PNG image that is shown when scripts are disabled.
    """
    title = title_of(runs, by).partition(" by ")[0]
    data = {
        "by": by,
        "axes": [[name, axis.title] for name, axis in AXES.items() if any(run.has(axis.field) for run in runs)],
        "figures": list(figures),
        "runs": [
            {"name": run.name, "color": color, "curves": {name: _curves(run, name) for name in figures}}
            for run, color in zip(runs, itertools.cycle(COLORS), strict=False)
        ],
    }
    metric_meanings = [f"{name.replace('_', ' ')}: {METRICS[name].meaning}" for name in figures if name in METRICS]
    explanations = [
        f"{SMOOTHING}. Curves with more than {_MAX_POINTS} points are averaged over neighboring points.",
        "Losses are in nats per target. k, M, B and T are 10^3, 10^6, 10^9 and 10^12.",
        *metric_meanings,
    ]
    values = {
        "TITLE": html.escape(title),
        "ROWS": "".join(map(_row, runs, itertools.cycle(COLORS))),
        "NOTES": "".join(f"<li>{html.escape(note)}</li>" for note in [*explanations, *notes]),
        "PICTURE": base64.b64encode(picture).decode(),
        "DATA": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),  # a run's name cannot end the script
    }
    # A single pass, so that a placeholder in the name of a run is not replaced.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: values[match[1]], _TEMPLATE.read_text(encoding="utf-8"))


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


def _row(run: RunLines, color: str) -> str:
    """Formats a run's table row as HTML: step, tokens, last training loss, best validation loss and time."""
    last = run.lines[-1]
    train, valid = run.last("train", "loss"), [x for x in run.lines if x["split"] == "valid" and x["loss"] is not None]
    best = min(valid, key=lambda line: line["loss"], default=None)
    tokens, seconds = last.get("text_tokens"), last.get(SECONDS)
    cells = (
        f"{last['step']:,}",
        "unknown" if tokens is None else large_number(tokens),
        "none" if train is None else f"{train:.4f}",
        "none" if best is None else f"{best['loss']:.4f} (step {best['step']:,})",
        "unknown" if seconds is None else elapsed(seconds),
    )
    name = f'<th><i style="background:{color}"></i>{html.escape(run.name)}</th>'
    return f"<tr>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
