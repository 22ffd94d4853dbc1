"""Draws law.png, which shows a fitted law and its runs, in the style of curves.png (the plot of a run's metrics)."""

from collections.abc import Sequence
from typing import Optional

import matplotlib
import numpy as np
from matplotlib import ticker

from pretrainax.reporting.curves import FAINT, INK, NORM, RATE, STYLE, TRAINING, VALIDATION, metric_title, two_panels
from pretrainax.scaling.power_laws import LossLaw
from pretrainax.scaling.prediction import Prediction

_COLORS = (TRAINING, VALIDATION, RATE, NORM, INK)
_TICKS = (1.0, 3.0)  # labeled values of each decade


def draw_law(
    path: str,
    law: LossLaw,
    extremes: Sequence[LossLaw],
    prediction: Optional[Prediction] = None,
    measured: Optional[float] = None,
) -> None:
    """Draws two panels in a PNG file: the loss over tokens, and contours of the loss over parameters and tokens.

    The first panel uses one color per model size. The second also shows the optimal N and D for each number of FLOPs.

    Args:
      path: the file to write.
      law: the law, whose runs are drawn as points.
      extremes: the laws at the ends of the constants' intervals; the plot shades the range of their optima.
      prediction: prediction of the loss of a held-out run, drawn with its interval.
      measured: the loss of the held-out run; None: unknown.
    """
    sizes, tokens, losses = (
        np.array([getattr(r, name) for r in law.runs], float) for name in ("parameters", "tokens", "loss")
    )
    token_grid = np.geomspace(tokens.min() / 2, max(tokens.max(), prediction.tokens if prediction else 0) * 4, 400)
    by_size, by_text = (
        rf"{_digits(x)}\ /\ {k}^{{{y:.3f}}}" for x, k, y in ((law.A, "N", law.alpha), (law.B, "D", law.beta))
    )
    formula = rf"$L = {law.E:.3f} + {by_size} + {by_text}$; N: parameters without embeddings, D: tokens of text"
    formula += "; shaded: laws at the ends of the 95 % intervals"
    with matplotlib.rc_context(STYLE):
        picture, panels = two_panels(f"Loss by parameters and tokens, {len(law.runs)} runs", formula)
        loss_panel, plane_panel = panels
        _draw_losses(loss_panel, law, sizes, tokens, losses, token_grid)
        _draw_plane(plane_panel, law, extremes, sizes, tokens, token_grid)
        for panel in panels:
            panel.set_xscale("log")
            panel.set_xlabel("tokens")
            panel.xaxis.set_major_locator(ticker.LogLocator(subs=_TICKS))
            panel.minorticks_off()
            panel.xaxis.set_major_formatter(ticker.FuncFormatter(_count))
            panel.set_xlim(token_grid[0], token_grid[-1])
        if prediction is not None:
            _draw_prediction(loss_panel, law, prediction, measured, token_grid)
        picture.savefig(path, facecolor="white")


def _draw_losses(panel, law: LossLaw, sizes, tokens, losses, token_grid) -> None:
    """Draws the loss over tokens: the law as a curve and the runs as points, one color per model size."""
    shows_asymptote = law.E > losses.min() / 2  # a lower line would compress the curves
    notes = "; dashed: E" * bool(shows_asymptote) + "; curves: text without repetition" * (law.repetition is not None)
    panel.set_title(f"validation {metric_title(law.metric, ())}{notes}")
    for i, size in enumerate(sorted(set(sizes))):
        color, is_size = _COLORS[i % len(_COLORS)], sizes == size
        panel.plot(token_grid, law.loss(size, token_grid), color=color, linewidth=1.5)
        panel.plot(tokens[is_size], losses[is_size], "o", color=color, markersize=5.5, markeredgecolor="white")
        panel.text(0.99, 0.95 - 0.055 * i, _count(size), color=color, ha="right", transform=panel.transAxes, fontsize=9)
    if shows_asymptote:
        panel.axhline(law.E, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), alpha=0.55)
    panel.grid(axis="x", visible=False)


def _draw_prediction(panel, law: LossLaw, prediction: Prediction, measured: Optional[float], token_grid) -> None:
    """Draws the law at the size of a held-out run, the predicted loss with its interval, and the measured loss."""
    panel.plot(token_grid, law.loss(prediction.parameters, token_grid), color=FAINT, linewidth=1.2, linestyle="dotted")
    if prediction.interval is not None:
        panel.plot([prediction.tokens] * 2, prediction.interval, color=INK, linewidth=2.5, solid_capstyle="butt")
    text = f"tokens; bar: run of {_count(prediction.parameters)} parameters, predicted {prediction.loss:.3f}"
    if measured is not None:
        panel.plot([prediction.tokens], [measured], "D", color=VALIDATION, markersize=6, markeredgecolor="white")
        text += f", measured {measured:.3f}"
    panel.set_xlabel(text)


def _draw_plane(panel, law: LossLaw, extremes, sizes, tokens, token_grid) -> None:
    """Draws contours of the loss over tokens and parameters, the optimal N and D with their range, and the runs."""
    panel.set_title("parameters; grey: equal loss, blue: lowest loss for 6 N D FLOPs")
    size_grid = np.geomspace(sizes.min() / 2, sizes.max() * 4, 400)
    panel.set_xscale("log")  # scales must be set before the contours, because the labels depend on them
    panel.set_yscale("log")
    panel.set_xlim(token_grid[0], token_grid[-1])
    panel.set_ylim(size_grid[0], size_grid[-1])
    loss = law.loss(size_grid[:, None], token_grid[None, :])  # [N, D]
    lines = panel.contour(token_grid, size_grid, loss, levels=10, colors="#9aa5b1", linewidths=0.9)
    panel.clabel(lines, fmt="%.2f", fontsize=8, inline_spacing=2)
    flops = np.geomspace(6 * size_grid[0] * token_grid[0] / 1e3, 6 * size_grid[-1] * token_grid[-1] * 1e3, 200)
    log_optima = [extreme.log_optimum(flops) for extreme in (law, *extremes)]  # (N, D), each [C]
    log_tokens = np.log(token_grid)
    optima = [np.interp(log_tokens, d, n) for n, d in log_optima]
    low, high = np.min(optima, axis=0), np.max(optima, axis=0)
    size_limits, token_limits = (np.log([grid[0] / 10, 10 * grid[-1]]) for grid in (size_grid, token_grid))
    low, high = np.exp(np.clip([low, high], *size_limits))
    panel.fill_between(token_grid, low, high, color=TRAINING, alpha=0.2, linewidth=0)
    log_size, log_text = law.log_optimum(flops)
    best_size, best_tokens = np.exp(np.clip(log_size, *size_limits)), np.exp(np.clip(log_text, *token_limits))
    panel.plot(best_tokens, best_size, color=TRAINING, linewidth=2)
    panel.plot(tokens, sizes, "o", color=VALIDATION, markersize=5.5, markeredgecolor="white")
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=_TICKS))
    panel.yaxis.set_major_formatter(ticker.FuncFormatter(_count))
    panel.minorticks_off()
    panel.grid(visible=False)


def _count(value: float, _: object = None) -> str:
    """Formats a number with three digits and a unit: "10 M"."""
    for size, name in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{name}"
    return f"{value:.3g}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
