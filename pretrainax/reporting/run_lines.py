"""Prepares the metrics of several runs for plots with a common x-axis, and finds metrics that a run lacks."""

import collections
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config.metric import declared

SECONDS = "seconds"
# Largest absolute value that is drawn. The margins of matplotlib overflow near 1e308; metrics are far below 1e30.
_LARGEST = 1e30


class Axis(NamedTuple):
    """An x-axis for curves."""

    field: str  # name of the x-values in a line of metrics.jsonl
    title: str


AXES = {
    "step": Axis("step", "step"),
    "tokens": Axis("text_tokens", "tokens of text"),
    "bytes": Axis("text_bytes", "bytes of text"),
    "flops": Axis("flops", "FLOPs"),
    "time": Axis(SECONDS, "time in steps, without compilation, evaluations and checkpoints"),
}
# The metrics that are drawn by default, if any run has them; the first metric has the largest panel.
MAIN_METRICS = ("loss", "bits_per_byte", "accuracy", "gradient_norm", "learning_rate", "tokens_per_second")


class RunLines(NamedTuple):
    """A run to plot: its name, and the lines of its metrics.jsonl with the times that `with_seconds` adds."""

    name: str
    lines: Sequence[Mapping]

    def curve(self, split: str, figure: str, by: str, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the x and y values of a metric's curve, each of shape [N] with N at most `most`.

        Null values become NaN. N is 0 if the metric has no values.

        Args:
          split: "train" or "valid".
          figure: name of the metric.
          by: name in AXES of the x-axis.
          most: maximum number of points. Neighboring points of longer curves are averaged.
        """
        axis = AXES[by].field
        pairs = [
            (x[axis], x[figure]) for x in self.lines if x["split"] == split and figure in x and x.get(axis) is not None
        ]
        points = np.array([(x_value, np.nan if value is None else value) for x_value, value in pairs], float).reshape(
            -1, 2
        )
        x_values, values = thinned(points, most).T
        return x_values, values

    def has(self, field: str, split: str = "") -> bool:
        """Checks whether any line of `split`, or of any split if `split` is "", has a value for a field."""
        return any(line.get(field) is not None for line in self.lines if split in ("", line["split"]))

    def last(self, split: str, field: str) -> Optional[float]:
        """Returns the last value of a field in the lines of a split, or None if no line has a value."""
        values = (
            line[field] for line in reversed(self.lines) if line["split"] == split and line.get(field) is not None
        )
        return next(values, None)

    def best(self, metric: str) -> Optional[Mapping]:
        """Returns the line of the best validation by a metric, or None if no validation has a value."""
        lines = [line for line in self.lines if line["split"] == "valid" and line.get(metric) is not None]
        choose = max if declared(metric).larger_is_better else min
        return choose(lines, key=lambda line: line[metric], default=None)


def drawable_numbers(lines: Sequence[Mapping]) -> tuple[list[dict], collections.Counter[str]]:
    """Replaces values that cannot be plotted (infinite ones, for example) with None.

    Returns the lines, and the number of replaced values by field. Lines whose step cannot be plotted are omitted, and
    are counted under the field "step".
    """
    left_out: collections.Counter[str] = collections.Counter()
    numeric = {name for line in lines for name, value in line.items() if _is_number(value)}
    numeric |= {axis.field for axis in AXES.values()} | {"step_seconds", "compile_seconds", *MAIN_METRICS}
    numbers = []
    for line in lines:
        invalid = {
            n: None
            for n, x in line.items()
            if n in numeric and x is not None and not (_is_number(x) and _is_drawable(x))
        }
        left_out.update(invalid.keys())
        if "step" not in invalid:
            numbers.append({**line, **invalid})
    return numbers, left_out


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_drawable(value: float) -> bool:
    return -_LARGEST <= value <= _LARGEST


def with_seconds(lines: Sequence[Mapping]) -> list[dict]:
    """Adds the field "seconds", the total time of all steps so far without compilation, to each line.

    A step that compiled counts with the mean time of the other steps of its line. If all steps of a line compiled, the
    line adds no time. Starting with the first training line whose time is unknown, "seconds" is None.
    """
    seconds: Optional[float] = 0.0
    timed, before = [], 0
    for line in lines:
        if line["split"] == "train":
            per_step, steps, before = line.get("step_seconds"), line["step"] - before, line["step"]
            if per_step is None and line.get("compile_seconds") is not None:
                per_step = 0.0
            seconds = None if seconds is None or per_step is None else seconds + per_step * steps
        timed.append({**line, SECONDS: seconds})
    return timed


def thinned(points: np.ndarray, most: int) -> np.ndarray:
    """Reduces points [N, 2] to at most `most` points by averaging neighbors; the last point stays unchanged."""
    if len(points) <= most:
        return points
    before = np.array_split(points[:-1], most - 1)
    return np.concatenate([[group.mean(axis=0) for group in before], points[-1:]])  # [most, 2]


def short_names(folders: Sequence[str]) -> list[str]:
    """Shortens folder paths to the fewest trailing components that make the names unique."""
    parts = [os.path.abspath(folder).split(os.sep) for folder in folders]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return list(folders)


def metrics_of(runs: Sequence[RunLines], wanted: Sequence[str] = (), selected: Sequence[str] = ()) -> list[str]:
    """Returns the metrics to plot: `wanted` or, if it is empty, all that at least one run has of the main ones.

    selected: the metrics by which the runs select their best checkpoints, which follow the loss.
    """
    main = dict.fromkeys((*MAIN_METRICS[:1], *selected, *MAIN_METRICS[1:]))
    return list(wanted) or [figure for figure in main if any(run.has(figure) for run in runs)]


def missing(runs: Sequence[RunLines], figures: Sequence[str], by: str) -> Iterator[str]:
    """Yields one line for each run that the plot omits, and one for all runs that lack the same metrics.

    Args:
      figures: names of the metrics to plot.
      by: name in AXES of the x-axis.
    """
    axis, lacking = AXES[by].field, collections.defaultdict(list)
    for run in runs:
        if not run.has(axis):
            source = "step_seconds" if axis == SECONDS else axis
            yield f"{run.name} is left out: --by={by} needs {source}, which its lines do not have"
        elif without := [figure for figure in figures if not run.has(figure)]:
            lacking[", ".join(without)].append(run.name)
    for metrics, names in lacking.items():
        yield f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no {metrics}"
