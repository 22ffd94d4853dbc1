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

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError
from pretrainax.config.metric import declared
from pretrainax.files.json_files import JsonObject
from pretrainax.files.outputs import output_folder
from pretrainax.files.paths import define_path
from pretrainax.reporting.run_lines import AXES
from pretrainax.reporting.runs_table import Report, text
from pretrainax.reporting.settings import field_rows
from pretrainax.reporting.visible import visible
from pretrainax.storage.places import with_urls


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
        from pretrainax.runs.run_reports import distinct, read_report, run_folders  # local import: imports JAX

        if not paths:
            raise UserError("give the folders of runs: python -m pretrainax.report runs/a runs/b")
        if cli.prints_json() and output.present:
            raise UserError("--output has no effect with --json, which writes no files: leave one of them out")
        folders = distinct(folder for path in paths for folder in run_folders(path))
        report = read_report(folders, metrics.value, axis.value)
        if cli.prints_json():
            cli.print_json(_values(report, folders))
            return 0
        return _write(report, output.value or "report")

    cli.run(run, texts=True, has_json=True, run_flags=())


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
    output_folder("output", os.path.dirname(output) or ".")
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
