"""Writes the page of several runs: one HTML file that loads nothing, its curves drawn by a small script of its own."""

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

from pretrainax.reporting.curves import trend_of
from pretrainax.reporting.overlay_picture import COLORS, NOISY, SMOOTHING, title_of
from pretrainax.reporting.run_lines import AXES, SECONDS, RunLines
from pretrainax.reporting.units import elapsed, large_number

_TEMPLATE = pathlib.Path(__file__).with_name("overlay_page.html")
_MOST_POINTS = 400  # of a curve: a phone draws them at once


def render(runs: Sequence[RunLines], figures: Sequence[str], by: str, notes: Sequence[str], picture: bytes) -> str:
    """Returns the page.

    Args:
      by: of AXES, which the page begins with.
      notes: lines of what is missing.
      picture: a PNG, for who runs no scripts.
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
    said = [f"{SMOOTHING}. A curve of more than {_MOST_POINTS} lines is drawn by means of neighbours.", *notes]
    parts = {
        "TITLE": html.escape(title),
        "ROWS": "".join(map(_row, runs, itertools.cycle(COLORS))),
        "NOTES": "".join(f"<li>{html.escape(note)}</li>" for note in said),
        "PICTURE": base64.b64encode(picture).decode(),
        "DATA": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),  # no name of a run ends the script
    }
    # In one pass: what a run is called is not filled in itself.
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda found: parts[found[1]], _TEMPLATE.read_text(encoding="utf-8"))


def _curves(run: RunLines, figure: str) -> dict[str, dict]:
    """Returns the points of a figure by split: places by axis, values, and of training the trend."""
    found = {}
    for split in ("train", "valid"):
        axes = {by: run.curve(split, figure, by, _MOST_POINTS) for by in AXES}
        x = {by: _numbers(places) for by, (places, values) in axes.items() if np.isfinite(values).any()}
        if x:
            y = {by: axes[by][1] for by in x}
            of_split = {"x": x, "y": {by: _numbers(values) for by, values in y.items()}}
            if split == "train" and figure in NOISY:
                of_split["trend"] = {by: _numbers(np.where(np.isfinite(v), trend_of(v), np.nan)) for by, v in y.items()}
            found[split] = of_split
    return found


def _numbers(values: np.ndarray) -> list[Optional[float]]:
    """Returns values to six digits, as a screen shows no more; what is not finite is null."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _row(run: RunLines, color: str) -> str:
    last = run.lines[-1]
    train, valid = run.last("train", "loss"), [x for x in run.lines if x["split"] == "valid" and x["loss"] is not None]
    best = min(valid, key=lambda line: line["loss"], default=None)
    tokens, seconds = last.get("text_tokens"), last.get(SECONDS)
    cells = (
        f"{last['step']:,}",
        "not known" if tokens is None else large_number(tokens),
        "none" if train is None else f"{train:.4f}",
        "none" if best is None else f"{best['loss']:.4f} (step {best['step']:,})",
        "not known" if seconds is None else elapsed(seconds),
    )
    name = f'<th><i style="background:{color}"></i>{html.escape(run.name)}</th>'
    return f"<tr>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
