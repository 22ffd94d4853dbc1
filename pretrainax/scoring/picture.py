"""Draws figures of a model over its training, in the style of curves.png."""

from collections.abc import Sequence

import matplotlib
import numpy as np

matplotlib.use("Agg")  # draws without a screen

from matplotlib import figure, ticker  # noqa: E402

from pretrainax.reporting import curves  # noqa: E402
from pretrainax.scoring.results import Result  # noqa: E402

_COLORS = (curves.TRAINING, curves.VALIDATION, curves.RATE, curves.NORM, curves.INK, curves.FAINT)
_COLUMNS = 3  # of panels, at most


def draw(path: str, results: Sequence[Result], title: str) -> None:
    """Draws a panel for each measure, a curve in it for each source and part; bars are two standard errors each way.

    Args:
      results: of several checkpoints, each with its step.
    """
    measures = list(dict.fromkeys(r.measure for r in results))
    names = list(dict.fromkeys((r.source, r.part) for r in results))
    columns = min(len(measures), _COLUMNS)
    rows = -(-len(measures) // columns)
    with matplotlib.rc_context(curves.STYLE):
        picture = figure.Figure(figsize=(4.4 * columns + 0.8, 3.4 * rows + 0.8 + 0.25 * len(names)), dpi=150)
        panels = picture.subplots(rows, columns, squeeze=False).ravel()
        for panel, measure in zip(panels, measures, strict=False):
            panel.set_title(measure.replace("_", " "))
            panel.set_xlabel("step")
            panel.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
            panel.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=5))
            panel.grid(axis="x", visible=False)
            for number, name in enumerate(names):
                _curve(panel, [r for r in results if r.measure == measure and (r.source, r.part) == name], number)
        for panel in panels[len(measures) :]:
            panel.set_visible(False)
        lines, _ = panels[0].get_legend_handles_labels()
        labels = [": ".join(filter(None, name)) for name in names][: len(lines)]
        picture.legend(lines, labels, loc="lower left", frameon=False, labelcolor=curves.FAINT)
        picture.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold", parse_math=False)
        picture.tight_layout(rect=(0, 0.3 * len(names) / picture.get_figheight(), 1, 1))
        picture.savefig(path, facecolor="white")


def _curve(panel, results: Sequence[Result], number: int) -> None:
    if not results:
        return
    errors = [np.nan if r.standard_error is None else 2 * r.standard_error for r in results]
    steps, values = [r.step for r in results], [r.value for r in results]
    color = _COLORS[number % len(_COLORS)]
    label = ": ".join(filter(None, (results[0].source, results[0].part)))
    panel.errorbar(steps, values, errors, color=color, marker="o", markersize=4.5, linewidth=1.6, capsize=2, label=label)
