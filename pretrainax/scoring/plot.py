"""Plots the scores of a run's checkpoints over training steps, in the style of curves.png."""

import itertools
from collections.abc import Sequence

import matplotlib
import numpy as np

matplotlib.use("Agg")  # a backend that needs no display

from matplotlib import figure, ticker  # noqa: E402

from pretrainax.reporting import curves  # noqa: E402
from pretrainax.scoring.results import Result, name_among  # noqa: E402

_COLORS = (curves.TRAINING, curves.VALIDATION, curves.RATE, curves.NORM, curves.INK, curves.FAINT)
_MAX_COLUMNS = 3  # maximum number of panels per row
_WIDTH, _HEIGHT, _LINE_HEIGHT = 4.5, 3.3, 0.24  # size of a panel and height of a line of text, in inches
_MAX_LINE_CHARACTERS = 130  # per line of text


def draw(path: str, results: Sequence[Result], title: str) -> None:
    """Plots the results with one panel per metric and one curve per source and part.

    Error bars are 95 % confidence intervals.

    Args:
      path: path of the image file.
      results: results for several checkpoints; `step` of each result is not None.
    """
    measures = list(dict.fromkeys(r.measure for r in results))
    sources = list(dict.fromkeys(r.source for r in results))
    names = dict(zip(dict.fromkeys(name_among(r, results) for r in results), itertools.cycle(_COLORS)))
    lines = [*((source, curves.FAINT) for source in sources if len(sources) == 1), *(n for n in names.items() if n[0])]
    columns = min(len(measures), _MAX_COLUMNS)
    rows = -(-len(measures) // columns)
    header = 0.7 + _LINE_HEIGHT * len(lines)
    height = _HEIGHT * rows + header
    with matplotlib.rc_context(curves.STYLE):
        fig = figure.Figure(figsize=(max(_WIDTH * columns, 9), height), dpi=150)
        panels = fig.subplots(rows, columns, squeeze=False).ravel()
        for panel, measure in itertools.zip_longest(panels, measures):
            if measure is None:
                panel.set_visible(False)
                continue
            for name, color in names.items():
                _draw_curve(
                    panel, [r for r in results if r.measure == measure and name_among(r, results) == name], color
                )
            panel.set_title(measure.replace("_", " "))
            panel.set_xlabel("step")
            panel.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
            panel.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=5))
            panel.grid(axis="x", visible=False)
        fig.tight_layout(rect=(0, 0, 1, 1 - header / height))
        fig.text(0.012, 1 - 0.35 / height, title, fontsize=16, weight="bold", va="center", parse_math=False)
        for number, (line, color) in enumerate(lines):
            text = line if len(line) <= _MAX_LINE_CHARACTERS else f"{line[: _MAX_LINE_CHARACTERS - 1]}…"
            fig.text(
                0.012, 1 - (0.7 + _LINE_HEIGHT * number) / height, text, color=color, va="center", parse_math=False
            )
        fig.savefig(path, facecolor="white")


def _draw_curve(panel, results: Sequence[Result], color: str) -> None:
    # Lengths of the error bars below and above the values, [2, n].
    errors = np.transpose([np.abs(np.subtract(r.interval or (np.nan, np.nan), r.value)) for r in results])
    style = {"color": color, "marker": "o", "markersize": 4.5, "linewidth": 1.6, "capsize": 2}
    panel.errorbar([r.step for r in results], [r.value for r in results], errors, **style)
