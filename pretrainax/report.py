"""Plots the metrics of several runs together: `python -m pretrainax.report RUN... [--by=tokens] [--output=report]`.

RUN is the folder of a run, running or finished, or a folder of runs, such as the --workdir of --seeds. The command
prints tables, and writes the picture report.png and the page report.html. The page loads nothing from the network and
works on desktops and phones. Its x-axis can be steps, tokens, bytes, FLOPs or time.

Runs with the same objective, tokenizer and validation text form a group. Only metrics of a group share a panel, unless
the metric compares between groups: bits per byte do not depend on the tokenizer. Runs of a group whose configs differ
only in the seed are one setting. The report names a best setting only if all runs have the same length, and the paired
differences of all other settings have intervals without 0 (`reporting/paired.py`). A table lists the config fields that
differ between the runs. Notes list metrics that do not compare or that are missing from a run.
"""

import os
import sys
from collections.abc import Iterator

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError
from pretrainax.config.choice import import_built_in
from pretrainax.config.metric import declared
from pretrainax.files.json_files import JsonObject
from pretrainax.files.paths import define_path, path_problem
from pretrainax.reporting.run_lines import (
    AXES,
    RunLines,
    drawable_numbers,
    metrics_of,
    missing,
    short_names,
    with_seconds,
)
from pretrainax.reporting.runs_table import Report, make_report, text
from pretrainax.reporting.settings import field_rows, select_by
from pretrainax.reporting.visible import visible
from pretrainax.storage.places import local_path, upload_status, with_urls
from pretrainax.training.metrics import read_metrics

_METRICS_FILE = "metrics.jsonl"


def main() -> None:
    """Defines the flags and runs the command.

    The flags are not defined on import, because other commands define flags with the same names.
    """
    axis = flags.DEFINE_enum("by", "step", list(AXES), "The x-axis of the picture, and the first x-axis of the page")
    metrics = flags.DEFINE_list(
        "metrics", [], "Metrics of metrics.jsonl to plot, such as loss,mfu; by default the main ones that any run has"
    )
    output = define_path("output", "report", "Path of the two files to write, without .png and .html")

    def run(*paths: str) -> int:
        from pretrainax.runs.run_records import read_record  # local import: imports JAX

        if not paths:
            raise UserError("give the folders of runs: python -m pretrainax.report runs/a runs/b")
        folders = [folder for path in paths for folder in _run_folders(path)]
        import_built_in()  # declares the metrics
        lines, line_counts = zip(*map(_read_lines, folders), strict=True)
        names, drawable = short_names(list(map(with_urls, folders))), list(map(drawable_numbers, lines))
        runs = [RunLines(name, with_seconds(lines)) for name, (lines, _) in zip(names, drawable, strict=True)]
        _check(runs, metrics.value, axis.value)
        records = list(map(read_record, folders))
        plotted = metrics_of(runs, metrics.value, [select_by(record) for record in records])
        notes = [
            *missing(runs, plotted, axis.value),
            *_upload_notes(runs, folders),
            *_line_notes(runs, drawable, lines, line_counts),
        ]
        report = make_report(runs, records, plotted, axis.value, notes)
        if cli.prints_json():
            cli.print_json(_values(report, folders))
            return 0
        return _write(report, output.value or "report")

    cli.run(run, texts=True, has_json=True)


def _run_folders(path: str) -> Iterator[str]:
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
    runs = [folder for folder in (path, *subfolders) if os.path.isfile(os.path.join(folder, _METRICS_FILE))]
    if not runs:
        raise UserError(f"{path} holds no run: neither it nor a folder in it has a {_METRICS_FILE}")
    yield from runs[:1] if runs[0] == path else runs


def _read_lines(folder: str) -> tuple[list[dict], int]:
    """Reads a run's metrics.jsonl, and returns its valid lines and the number of complete lines, valid or not.

    The last line may be incomplete if the run is still writing it.

    Raises:
      UserError: the file has no valid line.
    """
    with open(path := os.path.join(folder, _METRICS_FILE), "rb") as f:
        count = sum(line.endswith(b"\n") for line in f)
    if not (lines := read_metrics(path)):
        raise UserError(f"{folder} has no line in its {_METRICS_FILE} yet: leave it out, or wait for the first line")
    return lines, count


def _upload_notes(runs: list[RunLines], folders: list[str]) -> Iterator[str]:
    for run, folder in zip(runs, folders, strict=True):
        if line := upload_status(folder):
            yield f"{run.name}: {line}"


def _line_notes(runs: list[RunLines], drawable, lines, line_counts) -> Iterator[str]:
    """Yields a line for each field with values that cannot be drawn, and for each file with invalid lines."""
    for run, (_, counts) in zip(runs, drawable, strict=True):
        for field, count in counts.items():
            yield f"{run.name}: {_METRICS_FILE} has values of {field} that cannot be drawn; left out: {count:,}"
    for run, valid, count in zip(runs, lines, line_counts, strict=True):
        if len(valid) < count:
            yield (
                f"{run.name}: {_METRICS_FILE} has invalid lines, not JSON or without numbers for step and loss; "
                f"left out: {count - len(valid):,} of {count:,} lines"
            )


def _check(runs: list[RunLines], metrics: list[str], axis: str) -> None:
    numeric_metrics = sorted(
        {name for run in runs for line in run.lines for name, x in line.items() if isinstance(x, int | float)}
    )
    if unknown := [name for name in metrics if name not in numeric_metrics]:
        raise UserError(f"--metrics={unknown[0]}: no run has this metric; they have {', '.join(numeric_metrics)}")
    if not any(run.has(AXES[axis].field) for run in runs):
        raise UserError(f"--by={axis}: no run has counted this; use --by=step")


def _values(report: Report, folders: list[str]) -> JsonObject:
    """Returns the comparison as JSON: units, groups, settings, differing fields, and the points of each run.

    The points are the lines of metrics.jsonl with only the fields of the axis and the metrics.
    """
    names = [run.name for run in report.runs]
    fields = dict.fromkeys(("split", "step", AXES[report.by].field, *report.metrics))
    runs = [
        {"name": run.name, "folder": with_urls(folder)}
        | {"points": [{field: line[field] for field in fields if field in line} for line in run.lines]}
        for run, folder in zip(report.runs, folders, strict=True)
    ]
    groups = [
        {"name": group.name, "label": group.label, "runs": [names[i] for i in group.runs]}
        | {"properties": {name: part.text for name, part in group.parts.items()}}
        | {"metric": verdict.metric, "settings": verdict.to_json(report.runs)}
        | {"best": verdict.best and verdict.best.label, "verdict": verdict.text}
        for group, verdict in zip(report.groups, report.verdicts, strict=True)
    ]
    differing = [
        {"field": path, "values": [{"value": value, "runs": [names[i] for i in members]} for value, members in values]}
        for path, values in field_rows(report.records)
    ]
    return {
        "by": report.by,
        "x": AXES[report.by].field,
        "metrics": report.metrics,
        "units": {metric: declared(metric).unit for metric in report.metrics},
        "groups": groups,
        "differing_fields": differing,
        "runs": runs,
        "notes": report.notes,
    }


def _write(report: Report, output: str) -> int:
    """Prints the tables, writes {output}.png and {output}.html, and prints the notes to stderr. Returns 0."""
    from pretrainax.reporting import runs_page, runs_plot  # local import: matplotlib is slow to import

    for line in text(report):
        print(visible(line))
    for note in report.notes:
        print(visible(note), file=sys.stderr)
    cli.folder("output", os.path.dirname(output) or ".")
    picture, page = f"{output}.png", f"{output}.html"
    runs_plot.draw(picture, report)
    with open(picture, "rb") as f:
        html = runs_page.render(report, f.read())
    with open(page, "w", encoding="utf-8") as f:
        f.write(html)
    print(visible(with_urls(f"wrote {picture} and {page}")))
    return 0


if __name__ == "__main__":
    main()
