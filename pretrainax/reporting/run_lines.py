"""Lays the lines of several runs over each other: the axes that any two runs have in common, and what one lacks."""

import collections
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np

SECONDS = "seconds"
_LARGEST = (
    1e30  # of values that are drawn: matplotlib's margins overflow near 1e308, and no figure of a run comes close
)


class Axis(NamedTuple):
    """Is what curves are drawn over."""

    field: str  # of a line
    title: str


AXES = {
    "step": Axis("step", "step"),
    "tokens": Axis("text_tokens", "tokens of text"),
    "bytes": Axis("text_bytes", "bytes of text"),
    "flops": Axis("flops", "FLOPs"),
    "time": Axis(SECONDS, "time in steps, without evaluations and checkpoints"),
}
# What is shown where nothing is asked for, of what any run has; the first one is the largest panel.
FIGURES = ("loss", "bits_per_byte", "accuracy", "gradient_norm", "learning_rate", "tokens_per_second")


class RunLines(NamedTuple):
    """Holds a run's name, and the lines of its metrics.jsonl with the time that its steps have taken."""

    name: str
    lines: Sequence[Mapping]

    def curve(self, split: str, figure: str, by: str, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns places and values, at most so many: [N], [N]; a value that is null is NaN. [0], [0] without any."""
        axis = AXES[by].field
        found = [
            (x[axis], x[figure]) for x in self.lines if x["split"] == split and figure in x and x.get(axis) is not None
        ]
        points = np.array([(place, np.nan if value is None else value) for place, value in found], float).reshape(-1, 2)
        places, values = thinned(points, most).T
        return places, values

    def has(self, field: str, split: str = "") -> bool:
        """Returns True if any line, of a split or of both, has a value of a field."""
        return any(line.get(field) is not None for line in self.lines if split in ("", line["split"]))

    def last(self, split: str, field: str) -> Optional[float]:
        """Returns the last value of a field; None where there is none."""
        values = (
            line[field] for line in reversed(self.lines) if line["split"] == split and line.get(field) is not None
        )
        return next(values, None)


def numbers_alone(lines: Sequence[Mapping]) -> tuple[list[dict], collections.Counter[str]]:
    """Returns lines with null for what is no number in a field of numbers, and how many values that were, by field.

    A line whose step is beyond what can be drawn is left out; it counts as a value of "step".
    """
    left_out: collections.Counter[str] = collections.Counter()
    numeric = {name for line in lines for name, value in line.items() if _is_number(value)}
    numeric |= {axis.field for axis in AXES.values()} | {"step_seconds", *FIGURES}
    kept = []
    for line in lines:
        odd = {
            n: None for n, x in line.items() if n in numeric and x is not None and not (_is_number(x) and _is_drawn(x))
        }
        left_out.update(odd.keys())
        if "step" not in odd:
            kept.append({**line, **odd})
    return kept, left_out


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_drawn(value: float) -> bool:
    return -_LARGEST <= value <= _LARGEST


def with_seconds(lines: Sequence[Mapping]) -> list[dict]:
    """Returns the lines with "seconds", which all steps up to theirs have taken; None once one is not known."""
    seconds: Optional[float] = 0.0
    timed, before = [], 0
    for line in lines:
        if line["split"] == "train":
            of_step, steps, before = line.get("step_seconds"), line["step"] - before, line["step"]
            seconds = None if seconds is None or of_step is None else seconds + of_step * steps
        timed.append({**line, SECONDS: seconds})
    return timed


def thinned(points: np.ndarray, most: int) -> np.ndarray:
    """Returns at most so many of the points [N, 2]: the means of neighbours, and the last one as it is."""
    if len(points) <= most:
        return points
    before = np.array_split(points[:-1], most - 1)
    return np.concatenate([[group.mean(axis=0) for group in before], points[-1:]])  # [most, 2]


def names_of(folders: Sequence[str]) -> list[str]:
    """Returns the names of folders, as short as they are told apart by: the last parts of their paths."""
    parts = [os.path.abspath(folder).split(os.sep) for folder in folders]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return list(folders)


def figures_of(runs: Sequence[RunLines], wanted: Sequence[str] = ()) -> list[str]:
    """Returns what is drawn: the figures that are wanted, or those of FIGURES that any run has."""
    return list(wanted) or [figure for figure in FIGURES if any(run.has(figure) for run in runs)]


def missing(runs: Sequence[RunLines], figures: Sequence[str], by: str) -> Iterator[str]:
    """Yields a line for each run that is not in all panels, with the reason."""
    for run in runs:
        axis = AXES[by].field
        if not run.has(axis):
            source = "step_seconds" if axis == SECONDS else axis
            yield f"{run.name} is left out: its lines have no {source}, of which --by={by} is"
        elif without := [figure for figure in figures if not run.has(figure)]:
            yield f"{run.name} has no {', '.join(without)}"
