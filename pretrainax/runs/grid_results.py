"""Compares a grid's runs (--seeds, --sweep): best checkpoints, means over seeds, and differences of swept values.

With `config.evaluate.halves`, one half of the validation selects checkpoints and values, and the other half is
reported.
"""

import contextlib
import functools
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Optional

from pretrainax.checkpoints.best import best_checkpoint
from pretrainax.config.grid import GridRun, swept_numbers
from pretrainax.config.metric import SELECTION_HALF, larger_is_better, metric_text, reported_half
from pretrainax.files.errors import UserError, counted
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.reporting.paired import Ranking, Values, mean_interval, rank, with_interval
from pretrainax.reporting.tables import text_table
from pretrainax.training.metrics import read_metrics

_RUN, _GROUP = ("run", "exit", "best", "step", "checkpoint"), ("runs", "mean ± 95 %", "spread", "from the best mean")


class Result(NamedTuple):
    """The result of one run of a grid; unknown fields are None."""

    run: GridRun
    exit_code: Optional[int] = None  # None: the run has not ended yet
    step: Optional[int] = None  # step of the best checkpoint
    selection: Optional[float] = None  # value of the selection metric at this step
    value: Optional[float] = None  # value of the reported metric at this step
    metrics: Optional[JsonObject] = None  # all metrics of the validation at this step
    compile_seconds: Optional[float] = None  # seconds of the steps that compiled the update, over all starts
    config: Optional[JsonObject] = None  # content of the config.json that the run's last start wrote

    def to_json(self) -> JsonObject:
        """Returns this run's row for runs.json."""
        row = {"run": self.run.name, "seed": self.run.seed, "values": self.run.values, "exit_code": self.exit_code}
        row |= {"step": self.step, "selection": self.selection, "value": self.value, "metrics": self.metrics}
        return row | {"compile_seconds": self.compile_seconds, "config": self.config}


def result_of(run: GridRun, directory: str, exit_code: Optional[int]) -> Result:
    """Finds a run's best checkpoint in the run's folder `directory`, and returns the run's result.

    Args:
      exit_code: the run's exit code, or None if it has not ended. Only a run with exit code 0 gets a metric value.
    """
    checkpoints, config = os.path.join(directory, "checkpoints"), _config_of(directory)
    if exit_code != 0 or not os.path.isdir(checkpoints):
        return Result(run, exit_code, config=config)
    metric, compile_seconds = _selection_metric(run, config), _compile_seconds(os.path.join(directory, "metrics.jsonl"))
    best = best_checkpoint(checkpoints, metric)
    if best is None:
        return Result(run, exit_code, compile_seconds=compile_seconds, config=config)
    step, selection, metrics = best
    value = metrics.get(reported_half(metric), selection)  # a validation of one batch has no second half
    return Result(run, exit_code, step, selection, value, metrics, compile_seconds, config)


def _config_of(directory: str) -> Optional[JsonObject]:
    """Reads the config.json of a run; returns None if it is missing or damaged."""
    path = os.path.join(directory, "config.json")
    with contextlib.suppress(UserError):
        return read_object(path) if os.path.exists(path) else None
    return None


def _selection_metric(run: GridRun, config: Optional[JsonObject]) -> str:
    """Returns the metric that selects a run's checkpoints, which its data may determine when the run starts."""
    if not (metric := ((config or {}).get("evaluate") or {}).get("select_by")):
        return run.experiment.select_by
    return f"{metric}{SELECTION_HALF}" if run.experiment.evaluate.halves else metric


def _compile_seconds(path: str) -> Optional[float]:
    """Sums `compile_seconds` over a metrics.jsonl; returns None if the file is missing or has no such line."""
    lines = read_metrics(path) if os.path.exists(path) else []
    return sum(line["compile_seconds"] for line in lines if line.get("compile_seconds")) or None


class Group(NamedTuple):
    """The results of one combination of swept values, over all seeds."""

    values: dict[str, str]
    results: tuple[Result, ...]  # results of the runs that have ended

    @property
    def label(self) -> str:
        return ", ".join(f"{field}={value}" for field, value in self.values.items())

    @property
    def has_failures(self) -> bool:
        return any(result.value is None for result in self.results)

    def by_seed(self, name: Literal["value", "selection"]) -> Values:
        """Returns the reported metric or the selection metric of the successful runs, by seed."""
        values = {result.run.seed: getattr(result, name) for result in self.results}
        return {seed: value for seed, value in values.items() if value is not None}

    @property
    def finite_values(self) -> list[float]:
        return list(self.by_seed("value").values())

    @property
    def spread(self) -> Optional[float]:
        """Returns the standard deviation (n - 1) of the successful runs, or None if there are less than two."""
        return statistics.stdev(self.finite_values) if len(self.finite_values) > 1 else None

    def to_json(self) -> JsonObject:
        """Returns this group's row for runs.json."""
        values = self.finite_values
        low, high = (min(values), max(values)) if values else (None, None)
        mean, half_width = mean_interval(values) if values else (None, None)
        row = {"values": self.values, "runs": len(self.results), "with_metric": len(values), "mean": mean}
        return row | {"half_width": half_width, "spread": self.spread, "lowest": low, "highest": high}


class Comparison:
    """The results of all runs in a grid, compared by the `config.evaluate.select_by` metric.

    A group with a failed run is worse than all others and is not compared further.
    """

    def __init__(self, results: Sequence[Result]):
        self.results = results
        self.metric = _selection_metric(results[0].run, next((r.config for r in results if r.config), None))
        is_halved = all(reported_half(self.metric) in (result.metrics or {}) for result in results if result.step)
        self.reported = reported_half(self.metric) if is_halved else self.metric
        self.larger = larger_is_better(self.metric)
        ended = [result for result in results if result.exit_code is not None]
        combinations = {tuple(r.run.values.items()): r.run.values for r in results}
        self.groups = [Group(v, tuple(r for r in ended if r.run.values == v)) for v in combinations.values()]

    @functools.cached_property
    def compared(self) -> list[Group]:
        """Returns the groups without failed runs, which have at least one run that has ended."""
        return [group for group in self.groups if group.results and not group.has_failures]

    @functools.cached_property
    def ranking(self) -> Optional[Ranking]:
        """Compares the groups without failed runs; None if there are less than two."""
        if len(self.compared) < 2:
            return None
        values, selection = ([group.by_seed(name) for group in self.compared] for name in ("value", "selection"))
        return rank(self.reported, [group.label for group in self.compared], values, selection)

    @property
    def leader(self) -> Optional[Group]:
        """Returns the group with the best mean of the selection metric; the lead may be statistically insignificant."""
        return None if self.ranking is None else self.compared[self.ranking.leader]

    @property
    def best_group(self) -> Optional[Group]:
        """Returns the leader if it is distinguishable from all other groups without failed runs."""
        return self.leader if self.ranking is not None and self.ranking.best is not None else None

    @property
    def edges(self) -> list[str]:
        """Returns a warning for each swept number of the leader that is the lowest or highest value in the grid."""
        if self.leader is None:
            return []
        numbers = {group.label: swept_numbers(group.results[0].run) for group in self.groups if group.results}
        lines = []
        for field, (kind, number) in numbers[self.leader.label].items():
            swept = {n[field][1] for n in numbers.values() if field in n and n[field][0] == kind}
            if len(swept) > 1 and number in (min(swept), max(swept)):
                extreme, direction = ("lowest", "lower") if number == min(swept) else ("highest", "higher")
                lines.append(
                    f"{field}={number:g}, of the best mean, is the {extreme} of the grid; the best may be {direction}: "
                    "extend --sweep"
                )
        return lines

    def to_json(self) -> JsonObject:
        """Returns the content of runs.json, except for the runs' configs."""
        return {
            "metric": self.reported,
            "selected_by": self.metric,
            "larger_is_better": self.larger,
            "runs": [result.to_json() for result in self.results],
            "groups": [group.to_json() | {"difference": self._difference(group, "to_json")} for group in self.groups],
            "best_mean": self.leader and self.leader.values,
            "best": self.best_group and self.best_group.values,
            "verdict": self.ranking and self.ranking.text,
            "at_the_edge": self.edges,
        }

    def _difference(self, group: Group, method: Literal["to_json", "cell"], *args: str):
        """Returns a formatted difference of a group from the leader, or None if there is none."""
        if self.ranking is None or group not in self.compared:
            return None
        difference = self.ranking.differences[self.compared.index(group)]
        return difference and getattr(difference, method)(*args)

    def table(self, workdir: str) -> str:
        """Formats a table with one row per run, a table with one row per group, and the verdict."""
        fields = list(self.groups[0].values)
        text_columns = "<" * len(fields)
        lines = [
            *self._heading(),
            text_table([_RUN, *(self._row(result, workdir) for result in self.results)], "<>>><", indent="  "),
            "",
            text_table([[*fields, *_GROUP], *map(self._group_row, self.groups)], f"{text_columns}>><<", indent="  "),
        ]
        failed_runs = [r for r in self.results if r.exit_code is not None and r.value is None]
        if names := ", ".join(f"{r.run.name} (exit code {r.exit_code})" for r in failed_runs):
            lines.append(f"no result, counted as the worst: {names}")
        if self.ranking is not None:
            lines.append(self.ranking.text)
        return "\n".join([*lines, *(f"WARNING: {line}" for line in self.edges)])

    def _heading(self) -> Iterator[str]:
        better = "higher" if self.larger else "lower"
        yield f"{counted(len(self.results), 'run')} by validation {self.reported}, {better} is better"
        if self.reported != self.metric:
            yield f"checkpoints and the best mean are selected by {self.metric}, on other rows than the values below"
        elif len(self.groups) > 1:
            yield "the best values are selected on the rows that the table reports, so they are optimistic"
        yield "spread: standard deviation over seeds; ±: 95 % interval over seeds, of differences for all rows together"

    def _row(self, result: Result, workdir: str) -> list[str]:
        name, code = result.run.name, "" if result.exit_code is None else str(result.exit_code)
        if result.value is None or result.step is None:
            return [name, code]
        checkpoint = f"{os.path.join(workdir, name)}@best"
        return [name, code, metric_text(self.reported, result.value), f"{result.step:,}", checkpoint]

    def _group_row(self, group: Group) -> list[str]:
        values, count = group.finite_values, str(len(group.results))
        count = count if len(values) == len(group.results) else f"{len(values)} of {count}"
        mean = with_interval(self.reported, *mean_interval(values)) if values else "-"
        spread = "-" if group.spread is None else metric_text(self.reported, group.spread)
        return [*group.values.values(), count, mean, spread, self._difference(group, "cell", self.reported) or ""]
