"""Formats the comparison of several runs as tables: one per group of comparable runs, and one of differing fields."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

from pretrainax.config.metric import declared, reported
from pretrainax.files.errors import shortened
from pretrainax.reporting.paired import mean_interval, with_interval
from pretrainax.reporting.run_groups import Group, Panel, Record, comparison_notes, group_runs, panels_of
from pretrainax.reporting.run_lines import SECONDS, RunLines
from pretrainax.reporting.settings import Verdict, compare, field_rows, select_by
from pretrainax.reporting.signal_to_noise import SignalToNoise, last_values, signal_to_noise
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import elapsed, large_number

Table = list[list[str]]  # rows of cells; the first row is the header


class Report(NamedTuple):
    """Several runs and their comparison."""

    runs: Sequence[RunLines]
    records: Sequence[Record]
    groups: Sequence[Group]
    verdicts: Sequence[Verdict]  # of each group
    metrics: Sequence[str]  # the metrics to plot
    panels: Sequence[Panel]
    by: str  # name in AXES of the x-axis
    notes: Sequence[str]  # metrics that do not compare, and missing data
    # {group: metrics whose differences between settings noise can explain}; tables show them in parentheses
    undecided: Mapping[str, Collection[str]]

    @property
    def settings(self) -> list[object]:
        """Returns the setting of each run, which is equal for runs that differ only in the seed."""
        found: dict[int, object] = {
            i: (group.name, setting.label)
            for group, verdict in zip(self.groups, self.verdicts, strict=True)
            for setting in verdict.settings
            for i in setting.runs
        }
        return [found.get(i, i) for i in range(len(self.runs))]

    @property
    def title(self) -> str:
        """Returns the number of runs and groups, or the name of the only run."""
        groups = f" in {len(self.groups)} groups" if len(self.groups) > 1 else ""
        return f"{len(self.runs)} runs{groups}" if len(self.runs) > 1 else self.runs[0].name


def make_report(runs: Sequence[RunLines], records: Sequence[Record], metrics: Sequence[str], by: str, notes) -> Report:
    """Compares runs; `notes` are lines about missing data."""
    groups = group_runs(runs, records)
    notes = [*comparison_notes(runs, groups, records, metrics, by), *notes]
    verdicts = [compare(runs, records, group) for group in groups]
    undecided = {
        group.name: _undecided(runs, verdict, metrics) for group, verdict in zip(groups, verdicts, strict=True)
    }
    for group in groups:
        prefix = f"group {group.name}: " if len(groups) > 1 else ""
        notes += [f"{prefix}{ratio.note(metric)}" for metric, ratio in undecided[group.name].items()]
    return Report(runs, records, groups, verdicts, metrics, panels_of(runs, groups, metrics), by, notes, undecided)


def _undecided(runs: Sequence[RunLines], verdict: Verdict, metrics: Sequence[str]) -> dict[str, SignalToNoise]:
    """Returns the metrics that cannot rank the settings of a group."""
    ratios = {
        metric: signal_to_noise([[last_values(runs[i].lines, metric) for i in x.runs] for x in verdict.settings])
        for metric in metrics
    }
    return {metric: ratio for metric, ratio in ratios.items() if ratio is not None and not ratio.decides}


def run_table(report: Report, group: Group) -> Table:
    """Returns a row for each run of a group, with the validation metrics of the step that `select_by` selects."""
    best = {i: report.runs[i].best(select_by(report.records[i])) or {} for i in group.runs}
    metrics = [metric for metric in report.metrics if any(line.get(metric) is not None for line in best.values())]
    selected = dict.fromkeys(select_by(report.records[i]) for i in group.runs)
    metrics += [metric for metric in selected if metric not in metrics]
    undecided = report.undecided.get(group.name, ())
    header = ["", "run", "steps", "tokens", "train loss", *(f"valid {m.replace('_', ' ')}" for m in metrics)]
    rows = [[*header, "at step", "time in steps"]]

    def cell(metric: str, value: Optional[float]) -> str:
        if value is None:
            return "none"
        return f"({reported(metric, value)})" if metric in undecided else reported(metric, value)

    for i in group.runs:
        run = report.runs[i]
        tokens, seconds, loss = run.lines[-1].get("text_tokens"), run.lines[-1].get(SECONDS), run.last("train", "loss")
        cells = [
            "unknown" if tokens is None else large_number(tokens),
            "none" if loss is None else reported("loss", loss),
            *(cell(m, best[i].get(m)) for m in metrics),
            f"{best[i]['step']:,}" if best[i] else "none",
            "unknown" if seconds is None else elapsed(seconds),
        ]
        rows.append([str(i + 1), run.name, f"{run.lines[-1]['step']:,}", *cells])
    return rows


def setting_table(verdict: Verdict) -> Table:
    """Returns a row for each setting of a group with its mean over seeds; [] if each setting has a single run.

    The intervals are as in `paired.rank`.
    """
    if not verdict.metric or max((len(setting.runs) for setting in verdict.settings), default=0) < 2:
        return []
    metric = verdict.metric
    better = "higher" if declared(metric).larger_is_better else "lower"
    rows = [["setting", "runs", "seeds", f"valid {metric.replace('_', ' ')}, {better} is better", "from the best mean"]]
    for setting, difference in zip(verdict.settings, verdict.differences, strict=True):
        values = list(setting.values.values())
        mean = with_interval(metric, *mean_interval(values)) if values else "none"
        cells = [setting.label or "all", numbers(setting.runs), str(setting.seeds), mean]
        rows.append([*cells, "" if difference is None else difference.cell(metric)])
    return rows


def field_table(report: Report, most: int) -> Table:
    """Returns a row for each config field that differs between runs, with the runs of each value; [] if none does.

    most: maximum number of fields; the last row names the number of the others.
    """
    fields = field_rows(report.records)
    cells = lambda values: "   ".join(f"{numbers(runs)}: {_shortened(value)}" for value, runs in values)  # noqa: E731
    rows = [[path, cells(values)] for path, values in fields[:most]]
    more = [[f"and {len(fields) - most} more fields", "--json lists them"]] if len(fields) > most else []
    return [["config field", "runs: value"], *rows, *more] if rows else []


def _shortened(value: str, length: int = 60) -> str:
    return shortened(value) if len(value) <= length else f"{value[: length - 1]}…"


def numbers(indices: Sequence[int]) -> str:
    """Formats the numbers of runs, from 1, with ranges: [0, 1, 2, 4] as "1–3, 5"."""
    ranges: list[list[int]] = []
    for i in sorted(indices):
        if ranges and i == ranges[-1][1] + 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return ", ".join(f"{a + 1}" if a == b else f"{a + 1}–{b + 1}" for a, b in ranges)


def text(report: Report) -> Iterator[str]:
    """Yields the lines of the report for the terminal."""
    for group, verdict in zip(report.groups, report.verdicts, strict=True):
        if len(report.groups) > 1:
            yield f"group {group.title}"
        yield text_table(run_table(report, group), "><>", indent="  ")
        if settings := setting_table(verdict):
            yield "\n" + text_table(settings, "<<>", indent="  ")
        if verdict.text:
            yield f"  {verdict.text}"
        yield ""
    if fields := field_table(report, most=12):
        yield text_table(fields, "<", indent="  ") + "\n"
