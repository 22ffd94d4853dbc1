"""Chooses colors, dashes and markers for the curves of several runs, and places the labels at their ends."""

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

# Okabe and Ito (2008), "Color universal design": color-blind people can distinguish these colors. Grey replaces yellow,
# which is hard to see on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1f2933", "#8c8c8c")
DASHES = ((), (5, 2), (1, 1.6), (6, 2, 1, 2))  # lengths of lines and gaps, in line widths; (): a solid line
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")  # of matplotlib
MAX_NAMED = 8  # runs with their own color; more runs share a color per setting, and numbers label the curves
MAX_LABEL = 24  # characters of a name at the end of a curve; numbers replace longer names


class LineStyle(NamedTuple):
    """The look of a run's curves, which also differ without color."""

    color: str
    dashes: tuple[float, ...]
    marker: int  # index into MARKERS
    label: str  # text at the end of the curve: the run's name or number


def line_styles(names: Sequence[str], settings: Sequence[Hashable]) -> list[LineStyle]:
    """Returns the style of each run.

    Args:
      names: names of the runs.
      settings: setting of each run. If there are many runs, the runs of a setting have the same color and dashes.
    """
    is_named = len(names) <= MAX_NAMED
    numbers = dict(zip(dict.fromkeys(settings), itertools.count()))
    keys = [i if is_named else numbers[setting] for i, setting in enumerate(settings)]
    labels = names if is_named and max(map(len, names)) <= MAX_LABEL else [str(i + 1) for i in range(len(names))]
    return [
        LineStyle(COLORS[key % 8], DASHES[(key + key // 8) % 4], key % 8, label)
        for key, label in zip(keys, labels, strict=True)
    ]


def spread(heights: np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Moves labels apart, so that neighbors have a distance of `gap` (less if they do not fit), in the same order.

    The result has the smallest sum of squared moves (isotonic regression: pool adjacent violators).

    Args:
      heights: [N] desired heights.
      low, high: limits of the heights.
    """
    order = np.argsort(heights, kind="stable")
    gap = min(gap, (high - low) / max(len(heights) - 1, 1))
    steps = gap * np.arange(len(heights))
    pools: list[list[float]] = []  # [mean, number of labels]
    for value in heights[order] - steps:
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    means = np.repeat([mean for mean, _ in pools], [int(count) for _, count in pools])
    placed = np.empty(len(heights))
    placed[order] = np.clip(means, low, max(high - steps[-1], low) if len(steps) else high) + steps
    return placed


def label_columns(ends: np.ndarray, width: float) -> list[np.ndarray]:
    """Divides curves into columns of labels: the labels of a column are next to the longest of its curves.

    Curves that end close to the right edge, which leaves no room for a label, form the last column.

    Args:
      ends: [N] position of the end of each curve on the x-axis, as a fraction of its length.
      width: width of a label, as a fraction of the x-axis.

    Returns:
      The indices of the curves of each column, from left to right.
    """
    columns, remaining = [], np.flatnonzero(ends + width < 1)
    while len(remaining):
        chosen = ends[remaining] <= ends[remaining].min() + width
        columns.append(remaining[chosen])
        remaining = remaining[~chosen]
    last = np.flatnonzero(ends + width >= 1)
    return columns + [last] * bool(len(last))
