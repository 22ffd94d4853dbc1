"""Renders report.html, the page that plots several runs: one HTML file with a small script, which loads no files."""

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
_MOST_POINTS = 400  # per curve; a phone draws them without delay


def render(runs: Sequence[RunLines], figures: Sequence[str], by: str, notes: Sequence[str], picture: bytes) -> str:
    """Returns the page as HTML.

    Args:
      by: name in AXES of the first x-axis.
      notes: lines about missing data.
      picture: a PNG for readers without scripts.
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
    meanings = [f"{name.replace('_', ' ')}: {METRICS[name].meaning}" for name in figures if name in METRICS]
    explanations = [
        f"{SMOOTHING}. Curves with more than {_MOST_POINTS} points are averaged over neighboring points.",
        "Losses are in nats per target. k, M, B and T are 10^3, 10^6, 10^9 and 10^12.",
        *meanings,
    ]
    parts = {
        "TITLE": html.escape(title),
        "ROWS": "".join(map(_row, runs, itertools.cycle(COLORS))),
        "NOTES": "".join(f"<li>{html.escape(note)}</li>" for note in [*explanations, *notes]),
        "PICTURE": base64.b64encode(picture).decode(),
        "DATA": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),  # a run's name cannot end the script
    }
    # One pass, so that a placeholder in the name of a run is not replaced.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda found: parts[found[1]], _TEMPLATE.read_text(encoding="utf-8"))


def _curves(run: RunLines, figure: str) -> dict[str, dict]:
    """Returns the points of a metric by split: the values of y, the values of x on each axis, and training's trend."""
    curves = {}
    for split in ("train", "valid"):
        axes = {by: run.curve(split, figure, by, _MOST_POINTS) for by in AXES}
        x = {by: _numbers(places) for by, (places, values) in axes.items() if np.isfinite(values).any()}
        if x:
            y = {by: axes[by][1] for by in x}
            points = {"x": x, "y": {by: _numbers(values) for by, values in y.items()}}
            if split == "train" and figure in NOISY:
                points["trend"] = {by: _numbers(np.where(np.isfinite(v), trend_of(v), np.nan)) for by, v in y.items()}
            curves[split] = points
    return curves


def _numbers(values: np.ndarray) -> list[Optional[float]]:
    """Returns values rounded to six digits, enough for a screen; None for values that are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _row(run: RunLines, color: str) -> str:
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
