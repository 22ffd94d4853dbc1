"""Draws report.png, which plots several runs with one panel per metric and one color per run, as in curves.png."""

import itertools
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib import figure, ticker

from pretrainax.reporting.curves import FAINT, LEFT, MOST_POINTS, PART_COLORS, RIGHT, STYLE, line_with_trend, trend_of
from pretrainax.reporting.run_lines import AXES, RunLines
from pretrainax.reporting.units import clock, large_number, scientific

# The first two colors are blue and red, which color-blind people can distinguish.
COLORS = (PART_COLORS[1], PART_COLORS[0], *PART_COLORS[2:])
SMOOTHING = "bold: training, smoothed by a Gaussian mean of neighbors; faint: as logged; dots: validation"
# Training metrics that have an additional smoothed curve.
NOISY = ("loss", "gradient_norm", "tokens_per_second", "accuracy", "bits_per_byte")
_NOTE_FONT_SIZE = 9


def title_of(runs: Sequence[RunLines], by: str) -> str:
    """Returns the title of the plot and of the page."""
    return f"{len(runs)} runs by {AXES[by].title}" if len(runs) > 1 else f"{runs[0].name} by {AXES[by].title}"


def draw(path: str, runs: Sequence[RunLines], figures: Sequence[str], by: str, notes: Sequence[str]) -> None:
    """Plots the first metric in a large panel, and the remaining metrics below it, two panels per row.

    Training metrics are drawn as lines, and validation metrics as dots connected by dashed lines.

    Args:
      path: the PNG file to write.
      figures: names of the metrics, one per panel.
      by: name in AXES of the x-axis.
      notes: lines about missing data, printed below the panels.
    """
    rows = -(-(len(figures) - 1) // 2)
    footer_height = 0.5 + 0.2 * len(notes)  # inches
    legend_rows = -(-len(runs) // 4)  # number of rows of the legend
    header_height = 0.95 + 0.22 * legend_rows
    height = header_height + 4.0 + 2.9 * rows + footer_height
    with matplotlib.rc_context(STYLE):
        picture = figure.Figure(figsize=(12, height), dpi=150)
        edges = dict(left=LEFT, right=RIGHT, top=1 - header_height / height, bottom=(footer_height + 0.35) / height)
        ratios = (1.5, *[1] * rows)
        grid = picture.add_gridspec(len(ratios), 2, height_ratios=ratios, hspace=0.42, wspace=0.15, **edges)
        cells = [grid[0, :], *(grid[1 + i // 2, i % 2] for i in range(len(figures) - 1))]
        for cell, name in zip(cells, figures, strict=True):
            _draw_metric(picture.add_subplot(cell), runs, name, by)
        picture.text(LEFT, 1 - 0.35 / height, title_of(runs, by), fontsize=16, fontweight="bold", parse_math=False)
        picture.text(LEFT, 1 - 0.62 / height, SMOOTHING, color=FAINT)
        for i, (run, color) in enumerate(zip(runs, itertools.cycle(COLORS), strict=False)):
            position = LEFT + (i % 4) * (RIGHT - LEFT) / 4, 1 - (0.88 + 0.22 * (i // 4)) / height
            name = run.name if len(run.name) <= 34 else f"…{run.name[-33:]}"
            picture.text(
                *position, f"● {name}", color=color, fontweight="bold", fontsize=_NOTE_FONT_SIZE, parse_math=False
            )
        for i, note in enumerate(notes):
            position = LEFT, (footer_height - 0.3 - 0.2 * i) / height
            picture.text(*position, note, color=FAINT, fontsize=_NOTE_FONT_SIZE, parse_math=False)
        picture.savefig(path, facecolor="white")


def _draw_metric(panel, runs: Sequence[RunLines], name: str, by: str) -> None:
    """Draws the training and validation curves of one metric for all runs, and formats the axes."""
    panel.set_title(name.replace("_", " ") + (", nats per target" if name == "loss" else ""))
    panel.grid(axis="x", visible=False)
    for run, color in zip(runs, itertools.cycle(COLORS), strict=False):
        positions, values = run.curve("train", name, by, MOST_POINTS)
        line_with_trend(panel, positions, values, color, trend_of(values) if name in NOISY else values)
        positions, values = run.curve("valid", name, by, MOST_POINTS)
        panel.plot(positions, values, color=color, linewidth=1.0, alpha=0.6, linestyle=(0, (4, 2)))
        panel.plot(positions, values, "o", color=color, markersize=5, markeredgecolor="white", markeredgewidth=0.8)
    panel.set_xlabel(AXES[by].title)
    panel.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=by == "step"))
    panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: place_text(x, by)))
    panel.set_xlim(left=0)
    if name in ("learning_rate", "gradient_norm"):
        panel.set_ylim(bottom=0)
    if name == "gradient_norm":
        _limit_spikes(panel, runs, by)


def _limit_spikes(panel, runs: Sequence[RunLines], by: str) -> None:
    """Switches to a logarithmic y-axis if a spike would flatten the rest of the curves."""
    values = np.concatenate([run.curve("train", "gradient_norm", by, MOST_POINTS)[1] for run in runs])
    positive = values[values > 0]
    if len(positive) and positive.max() > 20 * np.median(positive):
        panel.set_yscale("log")
        panel.set_ylim(bottom=positive.min() / 1.5)


def place_text(place: float, by: str) -> str:
    """Formats a position on the x-axis `by`: "12,000" steps, "1.2 M" tokens, "3.1e18" FLOPs, "1:23:00" hours."""
    if by == "time":
        return clock(place)
    return f"{place:,.0f}" if by == "step" else scientific(place) if by == "flops" else large_number(place)
