"""Draws curves.png, the plot of a run, from the lines of its metrics.jsonl."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Optional

import matplotlib
import numpy as np

matplotlib.use("Agg")  # a backend that needs no display

from matplotlib import axes, figure, ticker  # noqa: E402

from pretrainax.config.metric import FRACTION, METRICS, STANDARD_ERRORS, declared  # noqa: E402
from pretrainax.reporting.run_lines import thinned  # noqa: E402

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
TRAINING, VALIDATION, RATE, NORM = "#3e7cb1", "#d1603d", "#5b8c5a", "#8a6fae"
PART_COLORS = (
    VALIDATION,
    TRAINING,
    RATE,
    NORM,
    "#c9a13b",
    "#3f9c9c",
    "#9c5a3c",
    "#5c6b7a",
)  # colors of per-part metrics, such as the loss of each source in a mixture
LEFT, RIGHT = 0.055, 0.97  # left and right edge of the panels, as fractions of the plot's width
HEIGHT, MORE = 7.0, 2.9  # height of the plot and of each additional row of panels, in inches
MOST_POINTS = 2000  # maximum points per curve; in longer curves, neighboring points are averaged
_TREND, _POINTS = "bold: smoothed training; faint: as logged", "; dots: validation"  # legends of the panels
BASELINES = {  # name of a loss -> explanation of its baseline
    "loss": "unigram baseline: token frequencies and the form of the targets",
    "replaced_loss": "baseline: predicts 'original' for every token",
}
_COPYING = "baseline: token frequencies, the form of the targets and copying"  # of the loss of a masked objective
STYLE = {
    "font.family": ["DejaVu Sans"],  # included in matplotlib, so that plots are the same on all machines
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": "#cbd2d9",
    "axes.titlesize": 10,
    "mathtext.default": "regular",
    "axes.titlecolor": FAINT,
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
}


def draw(
    path: str,
    lines: Sequence[dict],
    title: str,
    subtitle: str = "",
    baseline: Optional[Mapping[str, float]] = None,
    select_by: str = "loss",
) -> None:
    """Plots the main loss (in nats), the learning rate and the gradient norm over the steps, as a PNG file.

    The main loss is the loss by which checkpoints are selected, or "loss" if they are selected by another kind of
    metric. Additional panels show that other metric and the remaining validation losses, as well as the main loss and
    the other metric broken down by part of the data (by source, for example).

    Args:
      path: the PNG file to write.
      lines: lines of metrics.jsonl. Training and validation lines may be in any order. A null value leaves a gap. The
        standard errors of validation lines are drawn as bands.
      title, subtitle: text above the plots.
      baseline: losses of a model that ignores the context, by name. If None, no baseline is drawn.
      select_by: the metric by which checkpoints are selected, such as "accuracy" or "loss/source=wiki".
    """
    metrics = _main_metrics(select_by)
    main, baseline = metrics[0], baseline or {}
    train, valid = _points(lines, "train", main), _points(lines, "valid", main)
    other_metrics, part_metrics = _other_metrics(lines, metrics)
    rows = len(other_metrics) + len(part_metrics)
    height = HEIGHT + MORE * rows
    with matplotlib.rc_context(STYLE):
        picture = figure.Figure(figsize=(12, height), dpi=150)
        edges = dict(left=LEFT, right=RIGHT, top=1 - 0.18 * HEIGHT / height, bottom=0.08 * HEIGHT / height)
        ratios = (2.1, *[1] * (1 + rows))
        grid = picture.add_gridspec(len(ratios), 2, height_ratios=ratios, hspace=0.38, wspace=0.13, **edges)
        loss = picture.add_subplot(grid[0, :])
        rate, norm = picture.add_subplot(grid[1, 0]), picture.add_subplot(grid[1, 1])
        extra_panels = [picture.add_subplot(grid[2 + i, :]) for i in range(rows)]
        _draw_losses(loss, lines, main, baseline.get(main))
        _draw_rate(rate, *_points(lines, "train", "learning_rate"))
        _draw_norm(norm, *_points(lines, "train", "gradient_norm"))
        last = max((line["step"] for line in lines), default=1)
        for panel in (loss, rate, norm, *extra_panels):
            panel.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
            bins = 5 if panel in (rate, norm) else 8
            panel.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=bins, steps=[1, 2, 2.5, 5, 10]))
            panel.grid(axis="x", visible=False)
            panel.set_xlim(0, 1.01 * last)
            panel.set_xlabel("step")
        for panel, name in zip(extra_panels, other_metrics, strict=False):
            _draw_losses(panel, lines, name, baseline.get(name))
        for panel, names in zip(extra_panels[len(other_metrics) :], part_metrics, strict=True):
            _draw_parts(panel, lines, names)
        title_y, subtitle_y = (1 - fraction * HEIGHT / height for fraction in (0.055, 0.1))
        picture.text(LEFT, title_y, _shorten(title, 48), fontsize=16, fontweight="bold", va="center", parse_math=False)
        picture.text(LEFT, subtitle_y, _shorten(subtitle, 85), color=FAINT, va="center")
        baseline_label = _baseline_text(main, lines).partition(":")[0], baseline.get(main)
        _write_final_losses(picture, (title_y, subtitle_y), baseline_label, train[1], valid[1])
        picture.savefig(path, facecolor="white")


def two_panels(title: str, subtitle: str) -> tuple[figure.Figure, list[axes.Axes]]:
    """Creates a picture of two panels side by side; call it and draw in `matplotlib.rc_context(STYLE)`."""
    picture = figure.Figure(figsize=(12, 5.6), dpi=150)
    grid = picture.add_gridspec(1, 2, left=LEFT, right=RIGHT, top=0.78, bottom=0.12, wspace=0.2)
    picture.text(LEFT, 0.93, title, fontsize=16, fontweight="bold", va="center")
    picture.text(LEFT, 0.865, subtitle, color=FAINT, va="center")
    return picture, [picture.add_subplot(grid[0, i]) for i in range(2)]


def _baseline_text(metric: str, lines: Sequence[dict]) -> str:
    """Explains the baseline of a metric; the baseline of a masked objective copies visible targets."""
    if metric == "loss" and any("masked_loss" in line or "random_loss" in line for line in lines):
        return _COPYING
    return BASELINES.get(metric, "baseline")


def _main_metrics(select_by: str) -> list[str]:
    """Returns the name of the main loss and, if `select_by` is not a loss, that of the metric in `select_by`."""
    metric = select_by.partition("/")[0]
    return [metric] if metric.endswith("loss") else ["loss", metric]


def _other_metrics(lines: Sequence[dict], metrics: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Finds the metrics to draw besides the main loss; returns (metrics of the whole data, per-part metrics by kind).

    The first item has all other validation losses and the metrics in `metrics`. The second item has one list for each
    kind of per-part metric: "loss/source", for example, is the kind of "loss/source=wiki", the loss on one source.

    Args:
      metrics: the main loss, followed by any other metrics whose per-part metrics are to be drawn.
    """
    names = list(dict.fromkeys(name for line in lines if line["split"] == "valid" for name in line))
    total_metrics = [name for name in names if "/" not in name and name != metrics[0]]
    drawn_metrics = [name for name in total_metrics if name.endswith("loss") or name in metrics]
    part_metrics = [name for metric in metrics for name in names if name.startswith(f"{metric}/")]
    kinds = dict.fromkeys(name.partition("=")[0] for name in part_metrics)
    return drawn_metrics, [[name for name in part_metrics if name.startswith(f"{kind}=")] for kind in kinds]


def _shorten(text: str, length: int) -> str:
    """Truncates a title or label to at most `length` characters, so that it does not overlap the text next to it."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _points(lines: Sequence[dict], split: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps and values of one curve, each of shape [N] with N at most MOST_POINTS.

    Null values become NaN. In long curves, neighboring points are averaged, except for the last point.
    """
    pairs = [(x["step"], np.nan if x.get(name) is None else x[name]) for x in lines if x["split"] == split]
    steps, values = thinned(np.array(pairs, dtype=float).reshape(-1, 2), MOST_POINTS).T
    return steps, values


def _errors(lines: Sequence[dict], name: str) -> np.ndarray:
    """Returns the standard error of each point of `_points(lines, "valid", name)`, [N]; NaN if it is unknown."""
    return _points([{**x, name: x.get(STANDARD_ERRORS, {}).get(name)} for x in lines], "valid", name)[1]


def _draw_parts(panel, lines: Sequence[dict], names: Sequence[str]) -> None:
    """Draws a validation metric for each part of a mixture, with a legend on the right."""
    metric, _, part = names[0].partition("/")
    panel.set_title(f"validation {_words(metric)} by {part.partition('=')[0]}")
    for name, color in zip(names, itertools.cycle(PART_COLORS), strict=False):
        label = _shorten(name.partition("=")[2], 24)
        panel.plot(*_points(lines, "valid", name), "o-", color=color, linewidth=1.2, markersize=3.5, label=label)
    panel.legend(loc="upper right", fontsize=8, frameon=False, labelcolor=FAINT)
    panel.set_xlim(0, 1.2 * panel.get_xlim()[1])


def metric_title(metric: str, names: Collection[str]) -> str:
    """Returns a metric's name with its unit; a loss that no module declares is in nats.

    names: all metrics of the runs.
    """
    title, is_declared = _words(metric), metric.partition("/")[0] in METRICS
    unit = declared(metric, names).unit if is_declared else "nats" * metric.endswith("loss")
    return title if unit == FRACTION or unit in title else f"{title}, {unit}"


def _words(metric: str) -> str:
    return metric.replace("_", " ")


def _draw_losses(panel, lines: Sequence[dict], name: str, baseline_loss: Optional[float]) -> None:
    """Draws the training and validation curves of a metric, its baseline, and the band of the standard errors."""
    train, valid, errors = _points(lines, "train", name), _points(lines, "valid", name), _errors(lines, name)
    panel.set_title(metric_title(name, {field for line in lines for field in line}))
    panel.set_title(_TREND + _POINTS, loc="right", fontsize=9)
    line_with_trend(panel, *train, TRAINING, trend=trend_of(train[1]))
    panel.plot(*valid, color=VALIDATION, linewidth=1.2, alpha=0.6)
    panel.plot(*valid, "o", color=VALIDATION, markersize=5.5, markeredgecolor="white", markeredgewidth=0.8)
    if np.isfinite(errors).any():
        # The edge shows the band of a point without a neighbor.
        bounds = valid[1] - errors, valid[1] + errors
        panel.fill_between(valid[0], *bounds, color=VALIDATION, alpha=0.2, linewidth=1.2)
        panel.set_title(f"{_TREND}{_POINTS}; band: standard error", loc="right", fontsize=9)
    if baseline_loss is not None:
        panel.axhline(baseline_loss, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), alpha=0.55)
        values = np.concatenate([train[1], valid[1]])
        is_top = not (values > baseline_loss).any()  # a label above the line would cover the title
        offset, alignment = (-4, "top") if is_top else (4, "bottom")
        panel.annotate(
            _baseline_text(name, lines), (1, baseline_loss), xycoords=("axes fraction", "data"),
            xytext=(0, offset), textcoords="offset points", color=FAINT, fontsize=9, ha="right", va=alignment, zorder=1,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )  # fmt: skip


def _draw_rate(panel, steps: np.ndarray, values: np.ndarray) -> None:
    exponent = math.floor(math.log10(np.nanmax(values, initial=1e-12)))
    panel.set_title(rf"learning rate, in units of $10^{{{exponent}}}$")
    _line(panel, steps, values / 10**exponent, color=RATE, linewidth=2)
    panel.set_ylim(bottom=0)


def _draw_norm(panel, steps: np.ndarray, values: np.ndarray) -> None:
    """Draws the gradient norm with its trend, on a logarithmic axis if there are spikes."""
    panel.set_title("gradient norm, before clipping")
    panel.set_title(_TREND.replace(" training", ""), loc="right", fontsize=9)
    positive = values[values > 0]
    line_with_trend(panel, steps, values, NORM, trend=np.exp(trend_of(np.log(np.where(values > 0, values, np.nan)))))
    if len(positive) and positive.max() > 20 * np.median(positive):  # a spike would flatten the rest of the curve
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        panel.yaxis.set_minor_formatter(ticker.NullFormatter())
        panel.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        panel.set_ylim(bottom=0)


def line_with_trend(panel, steps: np.ndarray, values: np.ndarray, color: str, trend: np.ndarray) -> None:
    """Draws a faint curve of `values` and a bold curve of `trend`, both with gaps where values are not finite."""
    _line(panel, steps, values, color=color, linewidth=1, alpha=0.3)
    _line(panel, steps, np.where(np.isfinite(values), trend, np.nan), color=color, linewidth=2)


def _line(panel, steps: np.ndarray, values: np.ndarray, **style: object) -> None:
    """Draws a curve, with a dot for each finite point without a finite neighbor, which no line would show."""
    finite = np.pad(np.isfinite(values), 1)
    isolated = finite[1:-1] & ~finite[:-2] & ~finite[2:]
    panel.plot(steps, values, marker="o", markersize=5, markevery=np.flatnonzero(isolated).tolist(), **style)


def trend_of(values: np.ndarray) -> np.ndarray:
    """Smooths values [N] with a centered Gaussian, which introduces no lag.

    The Gaussian is narrower at the beginning of a run, where the loss falls steeply.
    """
    indices = np.arange(len(values))
    width = np.clip(0.5 + 0.1 * indices, None, max(len(values) / 50, 1.0))  # [N] points
    weights = (
        np.exp(-0.5 * ((indices[:, None] - indices[None, :]) / width[:, None]) ** 2) * np.isfinite(values)[None, :]
    )
    total = weights.sum(axis=1)
    return np.where(total > 1e-9, weights @ np.nan_to_num(values) / np.maximum(total, 1e-9), np.nan)


def _write_final_losses(
    picture, heights: tuple[float, float], baseline: tuple[str, Optional[float]], train: np.ndarray, valid: np.ndarray
) -> None:
    """Writes the last losses in the colors of their curves, so that they also serve as the legend.

    Args:
      heights: positions of the two lines of text, as fractions of the plot's height.
      baseline: (name, loss), where the loss is None if there is no baseline.
    """
    x = RIGHT
    for name, values, color in (
        (baseline[0], np.array(baseline[1:], float), FAINT),
        ("training loss", train, TRAINING),
        ("validation loss", valid, VALIDATION),
    ):
        if np.isfinite(values[-1:]).any():
            picture.text(
                x, heights[0], f"{values[-1]:.3f}", fontsize=16, color=color, weight="bold", ha="right", va="center"
            )
            picture.text(x, heights[1], name, color=FAINT, ha="right", va="center")
            x -= 0.125
