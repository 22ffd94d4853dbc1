"""curves.png: the picture of a run, drawn from the lines of its metrics.jsonl."""

import math
from collections.abc import Sequence
from typing import Optional

import matplotlib
import numpy as np

matplotlib.use("Agg")  # draws without a screen

from matplotlib import figure, ticker  # noqa: E402

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
TRAINING, VALIDATION, RATE, NORM = "#3e7cb1", "#d1603d", "#5b8c5a", "#8a6fae"
LEFT, RIGHT = 0.055, 0.97  # of the panels, in parts of the picture's width
MOST_POINTS = 2000  # of a curve; a longer one is drawn by the means of neighbours
STYLE = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same picture on every machine
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
    path: str, lines: Sequence[dict], title: str, subtitle: str = "", baseline_loss: Optional[float] = None
) -> None:
    """Draws losses in nats above, learning rate and gradient norm below, over the steps.

    Args:
      lines: of metrics.jsonl, any order of splits; a value that is null leaves a gap.
      baseline_loss: what token frequencies and the form of the targets score on the validation targets.
    """
    train, valid = _points(lines, "train", "loss"), _points(lines, "valid", "loss")
    with matplotlib.rc_context(STYLE):
        picture = figure.Figure(figsize=(12, 7), dpi=150)
        grid = picture.add_gridspec(
            2, 2, height_ratios=(2.1, 1), left=LEFT, right=RIGHT, top=0.82, bottom=0.08, hspace=0.38, wspace=0.13
        )
        loss = picture.add_subplot(grid[0, :])
        rate = picture.add_subplot(grid[1, 0])
        norm = picture.add_subplot(grid[1, 1])
        _draw_losses(loss, train, valid, baseline_loss)
        _draw_rate(rate, *_points(lines, "train", "learning_rate"))
        _draw_norm(norm, *_points(lines, "train", "gradient_norm"))
        last = max((line["step"] for line in lines), default=1)
        for panel in (loss, rate, norm):
            panel.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
            bins = 8 if panel is loss else 5
            panel.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=bins, steps=[1, 2, 2.5, 5, 10]))
            panel.grid(axis="x", visible=False)
            panel.set_xlim(0, 1.01 * last)
            panel.set_xlabel("step")
        picture.text(LEFT, 0.945, _shorten(title, 48), fontsize=16, fontweight="bold", va="center", parse_math=False)
        picture.text(LEFT, 0.9, _shorten(subtitle, 85), color=FAINT, va="center")
        _final_losses(picture, train[1], valid[1], baseline_loss)
        picture.savefig(path, facecolor="white")


def _shorten(text: str, length: int) -> str:
    """Cuts a text, so that the numbers on the right have room."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _points(lines: Sequence[dict], split: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and values of one curve; null becomes NaN. The last point is always one that was logged."""
    found = [(x["step"], np.nan if x.get(name) is None else x[name]) for x in lines if x["split"] == split]
    points = np.array(found, dtype=float).reshape(-1, 2)
    together = -(-len(points) // MOST_POINTS)
    if together > 1:
        before, last = np.array_split(points[:-1], MOST_POINTS - 1), points[-1:]
        points = np.concatenate([[group.mean(axis=0) for group in before], last])
    steps, values = points.T
    return steps, values


def _draw_losses(panel, train, valid, baseline_loss: Optional[float]) -> None:
    panel.set_title("loss, nats per target")
    _line_with_trend(panel, *train, TRAINING, trend=_trend(train[1]))
    panel.plot(*valid, color=VALIDATION, linewidth=1.2, alpha=0.6)
    panel.plot(*valid, "o", color=VALIDATION, markersize=5.5, markeredgecolor="white", markeredgewidth=0.8)
    if baseline_loss is not None:
        panel.axhline(baseline_loss, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), alpha=0.55)
        panel.annotate(
            "unigram baseline: token frequencies and the form of the targets",
            (1, baseline_loss), xycoords=("axes fraction", "data"),
            xytext=(0, 4), textcoords="offset points", color=FAINT, fontsize=9, ha="right", va="bottom", zorder=1,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )  # fmt: skip


def _draw_rate(panel, steps: np.ndarray, values: np.ndarray) -> None:
    exponent = math.floor(math.log10(np.nanmax(values, initial=1e-12)))
    panel.set_title(rf"learning rate, in $10^{{{exponent}}}$")
    _line(panel, steps, values / 10**exponent, color=RATE, linewidth=2)
    panel.set_ylim(bottom=0)


def _draw_norm(panel, steps: np.ndarray, values: np.ndarray) -> None:
    panel.set_title("gradient norm")
    positive = values[values > 0]
    _line_with_trend(panel, steps, values, NORM, trend=np.exp(_trend(np.log(np.where(values > 0, values, np.nan)))))
    if len(positive) and positive.max() > 20 * np.median(positive):  # one spike would flatten the rest
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        panel.yaxis.set_minor_formatter(ticker.NullFormatter())
        panel.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        panel.set_ylim(bottom=0)


def _line_with_trend(panel, steps: np.ndarray, values: np.ndarray, color: str, trend: np.ndarray) -> None:
    _line(panel, steps, values, color=color, linewidth=1, alpha=0.3)
    _line(panel, steps, np.where(np.isfinite(values), trend, np.nan), color=color, linewidth=2)


def _line(panel, steps: np.ndarray, values: np.ndarray, **style: object) -> None:
    """Draws a curve; a point that has no neighbour, through which no line goes, is a dot."""
    there = np.pad(np.isfinite(values), 1)
    alone = there[1:-1] & ~there[:-2] & ~there[2:]
    panel.plot(steps, values, marker="o", markersize=5, markevery=np.flatnonzero(alone).tolist(), **style)


def _trend(values: np.ndarray) -> np.ndarray:
    """Returns a Gaussian mean of the neighbours: no lag, and narrow at the start, where the loss falls steeply."""
    at = np.arange(len(values))
    width = np.clip(0.5 + 0.1 * at, None, max(len(values) / 50, 1.0))  # [N] points
    weights = np.exp(-0.5 * ((at[:, None] - at[None, :]) / width[:, None]) ** 2) * np.isfinite(values)[None, :]
    total = weights.sum(axis=1)
    return np.where(total > 1e-9, weights @ np.nan_to_num(values) / np.maximum(total, 1e-9), np.nan)


def _final_losses(picture, train: np.ndarray, valid: np.ndarray, baseline_loss: Optional[float]) -> None:
    """Writes the last losses, each in the color of its curve: the legend too."""
    baseline = np.array([] if baseline_loss is None else [baseline_loss])
    right = RIGHT
    for name, values, color in (
        ("unigram baseline", baseline, FAINT),
        ("training loss", train, TRAINING),
        ("validation loss", valid, VALIDATION),
    ):
        if np.isfinite(values[-1:]).any():
            picture.text(
                right, 0.945, f"{values[-1]:.3f}", fontsize=16, color=color, weight="bold", ha="right", va="center"
            )
            picture.text(right, 0.9, name, color=FAINT, ha="right", va="center")
            right -= 0.125
