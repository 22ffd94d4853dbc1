"""Plots the time of a step by module and kernel kind, in the style of curves.png (the plot of a run's metrics)."""

import collections
from collections.abc import Sequence

import matplotlib
from matplotlib import figure

from pretrainax.planning.hlo.memory_traffic import KINDS
from pretrainax.profiling.kernels import UNKNOWN, Work
from pretrainax.profiling.report import idle_seconds, steps_of
from pretrainax.profiling.trace import Trace
from pretrainax.reporting.curves import FAINT, INK, PART_COLORS, STYLE

_MAX_BARS = 16  # maximum number of bars for modules; one additional bar has all other modules
_COLORS = dict(zip(KINDS, (*PART_COLORS, "#b56a8e"), strict=True)) | {UNKNOWN: "#c3ccd5", "": "#e4e7eb"}
_LEFT, _TOP = 0.3, 1.25  # left margin as a fraction of the width; top margin in inches
_ROW = 0.34  # height of a row, a bar and the gap below it, in inches


def draw(path: str, trace: Trace, work: Sequence[Work]) -> None:
    """Draws a PNG file with one bar per module, stacked by kernel kind, and a bar for idle time.

    The longest bar is at the top, and the bar for idle time is at the bottom.

    Args:
      path: the file to write.
      work: the result of `kernel_work`.
    """
    modules: dict[str, collections.Counter] = {}
    for kernels in work:
        modules.setdefault(kernels.module or "(none)", collections.Counter())[kernels.kind] += kernels.seconds
    ranked = sorted(modules.items(), key=lambda item: -item[1].total())
    rows, other_modules = ranked[:_MAX_BARS], ranked[_MAX_BARS:]
    if other_modules:
        rows.append(
            (
                f"{len(other_modules)} more modules",
                sum((seconds for _, seconds in other_modules), collections.Counter()),
            )
        )
    rows.append(("idle", collections.Counter({"": idle_seconds(trace)})))
    height = _TOP + _ROW * len(rows) + 0.6
    with matplotlib.rc_context(STYLE):
        picture = figure.Figure(figsize=(12, height), dpi=150)
        panel = picture.add_axes((_LEFT, 0.6 / height, 0.97 - _LEFT, 1 - (_TOP + 0.6) / height))
        _bars(panel, trace, rows)
        title = f"Time of a step by module, {1e3 * trace.seconds:.1f} ms in total"
        picture.text(0.02, 1 - 0.35 / height, title, fontsize=16, fontweight="bold", va="center")
        steps = f"{steps_of(trace)} on {trace.platform}, by module of the model; in % of a step"
        picture.text(0.02, 1 - 0.7 / height, steps, color=FAINT, va="center")
        picture.savefig(path, facecolor="white")


def _bars(panel, trace: Trace, rows: list[tuple[str, collections.Counter]]) -> None:
    """Draws one horizontal bar per row, stacked by kernel kind, as a percentage of the step time.

    Args:
      rows: (module, seconds by kind), from top to bottom.
    """
    kinds_in_legend: set[str] = set()
    for row, (_, seconds) in enumerate(rows):
        left = 0.0
        for kind in (kind for kind in _COLORS if kind in seconds):
            percent = 100 * seconds[kind] / trace.seconds
            label = None if kind in kinds_in_legend or not kind else kind
            panel.barh(row, percent, left=left, height=0.72, color=_COLORS[kind], label=label)
            kinds_in_legend.add(kind)
            left += percent
        panel.text(left, row, f" {left:.1f}", va="center", color=INK, fontsize=9)
    panel.set_yticks(range(len(rows)), [module for module, _ in rows])
    panel.tick_params(axis="y", labelcolor=INK)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.grid(axis="y", visible=False)
    panel.margins(x=0.08)
    panel.legend(loc="lower left", bbox_to_anchor=(-0.005, 1.0), ncols=5, frameon=False, fontsize=9)
