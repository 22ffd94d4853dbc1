"""Compares a grid's runs (--seeds, --sweep): best checkpoint, median and spread over seeds, and best swept values."""

import math
import os
import statistics
from collections.abc import Sequence
from typing import NamedTuple, Optional

from pretrainax.checkpoints.best import best_checkpoint
from pretrainax.config.grid import GridRun
from pretrainax.config.metric import larger_is_better
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.tables import text_table
from pretrainax.training.metrics import read_metrics

_RUN, _GROUP = ("run", "exit", "best", "step", "checkpoint"), ("runs", "median", "spread", "lowest", "highest")


class Result(NamedTuple):
    """The result of one run of a grid; unknown fields are None."""

    run: GridRun
    exit_code: Optional[int] = None  # None: the run has not ended yet
    step: Optional[int] = None  # step of the best checkpoint
    value: Optional[float] = None  # value of the selection metric at this step
    metrics: Optional[JsonObject] = None  # all metrics of the validation at this step
    compile_seconds: Optional[float] = None  # seconds of the steps that compiled the update, over all starts

    def to_json(self) -> JsonObject:
        """Returns this run's row for runs.json."""
        row = {"run": self.run.name, "seed": self.run.seed, "values": self.run.values, "exit_code": self.exit_code}
        row |= {"step": self.step, "value": self.value, "metrics": self.metrics}
        return row | {"compile_seconds": self.compile_seconds}


def result_of(run: GridRun, directory: str, exit_code: Optional[int]) -> Result:
    """Finds a run's best checkpoint in the run's folder `directory`, and returns the run's result.

    exit_code: the run's exit code, or None if it has not ended. Only a run with exit code 0 gets a metric value.
    """
    checkpoints = os.path.join(directory, "checkpoints")
    if exit_code != 0 or not os.path.isdir(checkpoints):
        return Result(run, exit_code)
    best = best_checkpoint(checkpoints, run.experiment.select_by) or (None, None, None)
    return Result(run, exit_code, *best, compile_seconds=_compile_seconds(os.path.join(directory, "metrics.jsonl")))


def _compile_seconds(path: str) -> Optional[float]:
    """Sums `compile_seconds` over a metrics.jsonl; returns None if the file is missing or has no such line."""
    lines = read_metrics(path) if os.path.exists(path) else []
    return sum(line["compile_seconds"] for line in lines if line.get("compile_seconds")) or None


class Group(NamedTuple):
    """The results of one combination of swept values, over all seeds."""

    values: dict[str, str]
    values_by_run: tuple[Optional[float], ...]  # selection metric of each ended run; None: the run failed
    median: Optional[float]  # a failed run counts as the worst value; None: the median is a failed run
    spread: Optional[float]  # standard deviation (n - 1) of the successful runs

    @property
    def finite_values(self) -> list[float]:
        return [value for value in self.values_by_run if value is not None]

    def to_json(self) -> JsonObject:
        """Returns this group's row for runs.json."""
        low, high = (min(self.finite_values), max(self.finite_values)) if self.finite_values else (None, None)
        counts = {"runs": len(self.values_by_run), "with_metric": len(self.finite_values)}
        row = {"values": self.values, **counts, "median": self.median, "spread": self.spread}
        return row | {"lowest": low, "highest": high}


class Comparison:
    """The results of all runs in a grid, compared by the `config.evaluate.select_by` metric."""

    def __init__(self, results: Sequence[Result]):
        self.results, self.metric = results, results[0].run.experiment.select_by
        self.larger = larger_is_better(self.metric)
        combinations = {tuple(r.run.values.items()): r.run.values for r in results}
        self.groups = [self._group(values) for values in combinations.values()]

    def _group(self, values: dict[str, str]) -> Group:
        run_values = tuple(r.value for r in self.results if r.run.values == values and r.exit_code is not None)
        worst = -math.inf if self.larger else math.inf
        median = statistics.median([worst if value is None else value for value in run_values] or [worst])
        finite_values = [value for value in run_values if value is not None]
        spread = statistics.stdev(finite_values) if len(finite_values) > 1 else None
        return Group(values, run_values, median if math.isfinite(median) else None, spread)

    @property
    def best_group(self) -> Optional[Group]:
        """Returns the group with the best median, or None if there are no swept values or no medians."""
        medians = {i: group.median for i, group in enumerate(self.groups) if group.median is not None}
        if not medians or not self.groups[0].values:
            return None
        return self.groups[(max if self.larger else min)(medians, key=medians.__getitem__)]

    @property
    def edges(self) -> list[str]:
        """Returns a warning for each swept field whose best value is the lowest or highest one in the grid."""
        lines = []
        for field, value in (self.best_group.values if self.best_group else {}).items():
            try:
                numbers, best = {float(group.values[field]) for group in self.groups}, float(value)
            except ValueError:  # values that are not numbers have no order
                continue
            if len(numbers) > 1 and best in (min(numbers), max(numbers)):
                extreme, direction = ("lowest", "lower") if best == min(numbers) else ("highest", "higher")
                lines.append(
                    f"{value} is the {extreme} {field} of the grid; the best may be {direction}: extend --sweep"
                )
        return lines

    def to_json(self) -> JsonObject:
        """Returns the content of runs.json, except for the runs' configs."""
        best = self.best_group and self.best_group.values
        return {
            "metric": self.metric,
            "larger_is_better": self.larger,
            "runs": [result.to_json() for result in self.results],
            "groups": [group.to_json() for group in self.groups],
            "best": best,
            "at_the_edge": self.edges,
        }

    def table(self, workdir: str) -> str:
        """Formats a table with one row per run, a table with one row per group, and the best group."""
        better = "higher" if self.larger else "lower"
        rows = [self._row(result, workdir) for result in self.results]
        groups = [_group_row(group) for group in self.groups]
        fields = list(self.groups[0].values)
        lines = [
            f"{len(rows)} runs by validation {self.metric}, {better} is better; spread: standard deviation over seeds",
            text_table([_RUN, *rows], "<>>><", indent="  "),
            "",
            text_table([[*fields, *_GROUP], *groups], "<" * len(fields) + ">", indent="  "),
        ]
        failed_runs = [r for r in self.results if r.exit_code is not None and r.value is None]
        if names := ", ".join(f"{r.run.name} (exit code {r.exit_code})" for r in failed_runs):
            lines.append(f"no result, counted as the worst: {names}")
        if self.best_group is not None:
            assert self.best_group.median is not None
            values = ", ".join(f"{field}={value}" for field, value in self.best_group.values.items())
            lines.append(f"best: {values}, median {self.best_group.median:.4f}")
        return "\n".join([*lines, *(f"WARNING: {line}" for line in self.edges)])

    def _row(self, result: Result, workdir: str) -> list[str]:
        name, code = result.run.name, "" if result.exit_code is None else str(result.exit_code)
        if result.value is None or result.step is None:
            return [name, code]
        return [name, code, f"{result.value:.4f}", f"{result.step:,}", f"{os.path.join(workdir, name)}@best"]


def _group_row(group: Group) -> list[str]:
    finite = group.finite_values
    numbers = [group.median, group.spread, min(finite, default=None), max(finite, default=None)]
    count = (
        f"{len(finite)}" if len(finite) == len(group.values_by_run) else f"{len(finite)} of {len(group.values_by_run)}"
    )
    return [*group.values.values(), count, *("-" if number is None else f"{number:.4f}" for number in numbers)]
