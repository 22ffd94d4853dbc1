"""Reads the folders of several runs, running or finished, and compares them in a `Report`."""

import os
from collections.abc import Iterable, Iterator, Sequence

from pretrainax.config import UserError
from pretrainax.config.choice import import_built_in
from pretrainax.files.errors import counted
from pretrainax.files.paths import path_problem
from pretrainax.reporting.run_lines import (
    AXES,
    RunLines,
    drawable_numbers,
    metrics_of,
    missing,
    short_names,
    with_seconds,
)
from pretrainax.reporting.runs_table import Report, make_report
from pretrainax.reporting.settings import select_by
from pretrainax.runs.run_records import read_record
from pretrainax.storage.places import local_path, upload_status, with_urls
from pretrainax.training.metrics import read_metrics

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.txt"  # the latest samples, after a line with their step


def run_folders(path: str) -> Iterator[str]:
    """Yields `path` itself if it is a run's folder, otherwise all run folders directly inside it.

    Raises:
      UserError: `path` is not a folder, or contains no run.
    """
    if problem := path_problem(path):
        raise UserError(f"{path}: {problem}")
    path = local_path(os.path.expanduser(path))
    if not os.path.isdir(path):
        raise UserError(f"{path} is not a folder: give the --workdir of a run")
    subfolders = sorted(os.path.join(path, name) for name in os.listdir(path))
    runs = [folder for folder in (path, *subfolders) if os.path.isfile(os.path.join(folder, METRICS_FILE))]
    if not runs:
        raise UserError(f"{path} holds no run: neither it nor a folder in it has a {METRICS_FILE}")
    yield from runs[:1] if runs[0] == path else runs


def distinct(folders: Iterable[str]) -> list[str]:
    """Removes repeated folders: `report runs/a runs` names runs/a twice."""
    return list({os.path.realpath(folder): folder for folder in folders}.values())


def read_report(folders: Sequence[str], metrics: Sequence[str], axis: str) -> Report:
    """Reads and compares runs.

    Args:
      folders: the folders of the runs.
      metrics: metrics to plot; () selects the main metrics that any run has.
      axis: name in AXES of the x-axis.

    Raises:
      UserError: a run has no metrics yet, or no run has one of `metrics` or the values of the axis.
    """
    import_built_in()  # declares the metrics
    lines, line_counts = zip(*map(_read_lines, folders), strict=True)
    names, drawable = short_names(list(map(with_urls, folders))), list(map(drawable_numbers, lines))
    runs = [RunLines(name, with_seconds(lines)) for name, (lines, _) in zip(names, drawable, strict=True)]
    _check(runs, metrics, axis)
    records = list(map(read_record, folders))
    plotted = metrics_of(runs, metrics, [select_by(record) for record in records])
    notes = [
        *missing(runs, plotted, axis),
        *_upload_notes(runs, folders),
        *_line_notes(runs, drawable, lines, line_counts),
    ]
    return make_report(runs, records, plotted, axis, notes)


def _read_lines(folder: str) -> tuple[list[dict], int]:
    """Reads a run's metrics.jsonl, and returns its valid lines and the number of complete lines, valid or not.

    The last line may be incomplete if the run is still writing it.

    Raises:
      UserError: the file has no valid line.
    """
    with open(path := os.path.join(folder, METRICS_FILE), "rb") as f:
        count = sum(line.endswith(b"\n") for line in f)
    if not (lines := read_metrics(path)):
        raise UserError(f"{folder} has no line in its {METRICS_FILE} yet: leave it out, or wait for the first line")
    return lines, count


def _upload_notes(runs: list[RunLines], folders: Sequence[str]) -> Iterator[str]:
    for run, folder in zip(runs, folders, strict=True):
        if line := upload_status(folder):
            yield f"{run.name}: {line}"


def _line_notes(runs: list[RunLines], drawable, lines, line_counts) -> Iterator[str]:
    """Yields a line for each field with values that cannot be drawn, and for each file with invalid lines."""
    for run, (_, counts) in zip(runs, drawable, strict=True):
        for field, count in counts.items():
            yield f"{run.name}: {METRICS_FILE} has values of {field} that cannot be drawn; left out: {count:,}"
    for run, valid, count in zip(runs, lines, line_counts, strict=True):
        if len(valid) < count:
            yield (
                f"{run.name}: {METRICS_FILE} has invalid lines, not JSON or without numbers for step and loss; "
                f"left out: {count - len(valid):,} of {counted(count, 'line')}"
            )


def _check(runs: list[RunLines], metrics: Sequence[str], axis: str) -> None:
    numeric_metrics = sorted(
        {name for run in runs for line in run.lines for name, x in line.items() if isinstance(x, int | float)}
    )
    if unknown := [name for name in metrics if name not in numeric_metrics]:
        raise UserError(f"--metrics={unknown[0]}: no run has this metric; they have {', '.join(numeric_metrics)}")
    if not any(run.has(AXES[axis].field) for run in runs):
        raise UserError(f"--by={axis}: no run has counted this; use --by=step")
