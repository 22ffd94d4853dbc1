"""Plots the metrics of several runs together: `python -m pretrainax.report RUN... [--by=tokens] [--output=report]`.

RUN is the folder of a run, running or finished, or a folder of runs, such as the --workdir of --seeds. The command
writes the picture report.png and the page report.html. The page loads nothing from the network, works on desktops and
phones, and switches between steps, tokens, bytes, FLOPs and time. Notes list the metrics that a run does not have.
"""

import os
import sys
from collections.abc import Iterator

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError
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
from pretrainax.reporting.visible import visible
from pretrainax.storage.places import local_path, upload_status, with_urls
from pretrainax.training.metrics import read_metrics

_FILE = "metrics.jsonl"


def main() -> None:
    """Defines the flags and runs the command. The flags are local because other commands use the same names."""
    by = flags.DEFINE_enum("by", "step", list(AXES), "The x-axis of the picture, and the first x-axis of the page")
    figures = flags.DEFINE_list(
        "figures", [], "Metrics of metrics.jsonl to plot, such as loss,mfu; by default the main ones that any run has"
    )
    output = define_path("output", "report", "Path of the two files to write, without .png and .html")

    def run(*given: str) -> int:
        if not given:
            raise UserError("give the folders of runs: python -m pretrainax.report runs/a runs/b")
        folders = [folder for path in given for folder in _folders(path)]
        lines, whole = zip(*map(_lines, folders), strict=True)
        names, read = short_names(list(map(with_urls, folders))), list(map(drawable_numbers, lines))
        runs = [RunLines(name, with_seconds(lines)) for name, (lines, _) in zip(names, read, strict=True)]
        _check(runs, figures.value, by.value)
        skipped = [
            f"{name}: {_FILE} has values of {field} that cannot be drawn; left out: {count:,}"
            for name, (_, counts) in zip(names, read, strict=True)
            for field, count in counts.items()
        ]
        skipped += [
            f"{name}: {_FILE} has invalid lines, not JSON or without numbers for step and loss; left out: "
            f"{count - len(run):,} of {count:,} lines"
            for name, run, count in zip(names, lines, whole, strict=True)
            if len(run) < count
        ]
        sent = [
            f"{run.name}: {line}" for run, folder in zip(runs, folders, strict=True) if (line := upload_status(folder))
        ]
        notes = [*missing(runs, metrics_of(runs, figures.value), by.value), *sent, *skipped]
        return _write(runs, metrics_of(runs, figures.value), by.value, output.value or "report", notes)

    cli.run(run, texts=True)


def _folders(path: str) -> Iterator[str]:
    """Yields `path` if it is the folder of a run, or else the folders of all runs in this folder."""
    if problem := path_problem(path):
        raise UserError(f"{path}: {problem}")
    path = local_path(os.path.expanduser(path))
    if not os.path.isdir(path):
        raise UserError(f"{path} is not a folder: give the --workdir of a run")
    inside = sorted(os.path.join(path, name) for name in os.listdir(path))
    runs = [folder for folder in (path, *inside) if os.path.isfile(os.path.join(folder, _FILE))]
    if not runs:
        raise UserError(f"{path} holds no run: neither it nor a folder in it has a {_FILE}")
    yield from runs[:1] if runs[0] == path else runs


def _lines(folder: str) -> tuple[list[dict], int]:
    """Returns the valid lines of metrics.jsonl, and the number of complete lines.

    The last line may be incomplete, because the run may be writing it.
    """
    with open(path := os.path.join(folder, _FILE), "rb") as f:
        count = sum(line.endswith(b"\n") for line in f)
    if not (lines := read_metrics(path)):
        raise UserError(f"{folder} has no line in its {_FILE} yet: leave it out, or wait for the first line")
    return lines, count


def _check(runs: list[RunLines], figures: list[str], by: str) -> None:
    known = sorted(
        {name for run in runs for line in run.lines for name, x in line.items() if isinstance(x, int | float)}
    )
    if unknown := [name for name in figures if name not in known]:
        raise UserError(f"--figures={unknown[0]}: no run has this metric; they have {', '.join(known)}")
    if not any(run.has(AXES[by].field) for run in runs):
        raise UserError(f"--by={by}: no run has counted this; use --by=step")


def _write(runs: list[RunLines], figures: list[str], by: str, output: str, notes: list[str]) -> int:
    from pretrainax.reporting import runs_page, runs_plot  # local import: matplotlib is slow to import

    for note in notes:
        print(visible(note), file=sys.stderr)
    cli.folder("output", os.path.dirname(output) or ".")
    picture, page = f"{output}.png", f"{output}.html"
    runs_plot.draw(picture, runs, figures, by, notes)
    with open(picture, "rb") as f:
        text = runs_page.render(runs, figures, by, notes, f.read())
    with open(page, "w", encoding="utf-8") as f:
        f.write(text)
    print(visible(with_urls(f"wrote {picture} and {page}")))
    return 0


if __name__ == "__main__":
    main()
