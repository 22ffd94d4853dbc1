"""Lays runs over each other: `python -m pretrainax.report RUN... [--by=tokens] [--output=report]`.

RUN is the folder of a run, going on or done, or one of runs, as --seeds makes it. Writes a picture, report.png, and a
page, report.html, which loads nothing from elsewhere and shows the same over steps, tokens, bytes, FLOPs or time, on a
desktop and on a phone. What a run lacks is said.
"""

import os
import sys
from collections.abc import Iterator

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError
from pretrainax.files.paths import define_path, path_problem
from pretrainax.reporting.run_lines import AXES, RunLines, figures_of, missing, names_of, numbers_alone, with_seconds
from pretrainax.reporting.visible import visible
from pretrainax.storage.places import here, named, sent_line
from pretrainax.training.metrics import read_metrics

_FILE = "metrics.jsonl"


def main() -> None:
    """Defines the flags, and runs the command: here, as other commands have flags of the same names."""
    by = flags.DEFINE_enum("by", "step", list(AXES), "What the curves are drawn over")
    figures = flags.DEFINE_list(
        "figures", [], "Names of metrics.jsonl, as loss,mfu; else the usual ones, where runs have any"
    )
    output = define_path("output", "report", "The files, without .png and .html")

    def run(*given: str) -> int:
        if not given:
            raise UserError("give the folders of runs: python -m pretrainax.report runs/a runs/b")
        folders = [folder for path in given for folder in _folders(path)]
        lines, whole = zip(*map(_lines, folders), strict=True)
        names, read = names_of(list(map(named, folders))), list(map(numbers_alone, lines))
        runs = [RunLines(name, with_seconds(lines)) for name, (lines, _) in zip(names, read, strict=True)]
        _check(runs, figures.value, by.value)
        odd = [
            f"{name}: left out of {_FILE}, as no numbers that can be drawn: {count:,} of {field}"
            for name, (_, counts) in zip(names, read, strict=True)
            for field, count in counts.items()
        ]
        odd += [
            f"{name}: left out {count - len(run):,} of the {count:,} lines of {_FILE}, which no run has written so: "
            "no JSON, or no numbers of step and loss"
            for name, run, count in zip(names, lines, whole, strict=True)
            if len(run) < count
        ]
        sent = [f"{run.name}: {line}" for run, folder in zip(runs, folders, strict=True) if (line := sent_line(folder))]
        notes = [*missing(runs, figures_of(runs, figures.value), by.value), *sent, *odd]
        return _write(runs, figures_of(runs, figures.value), by.value, output.value or "report", notes)

    cli.run(run, texts=True)


def _folders(path: str) -> Iterator[str]:
    """Yields the folder of a run, or those of the runs in a folder."""
    if problem := path_problem(path):
        raise UserError(f"{path}: {problem}")
    path = here(os.path.expanduser(path))
    if not os.path.isdir(path):
        raise UserError(f"{path} is no folder: give the --workdir of a run")
    inside = sorted(os.path.join(path, name) for name in os.listdir(path))
    found = [folder for folder in (path, *inside) if os.path.isfile(os.path.join(folder, _FILE))]
    if not found:
        raise UserError(f"{path} holds no run: there is no {_FILE} in it, nor in the folders in it")
    yield from found[:1] if found[0] == path else found


def _lines(folder: str) -> tuple[list[dict], int]:
    """Returns the lines that can be read, and how many there are; the one that is being written counts as none."""
    with open(path := os.path.join(folder, _FILE), "rb") as f:
        count = sum(line.endswith(b"\n") for line in f)
    if not (lines := read_metrics(path)):
        raise UserError(f"{folder} has no line in its {_FILE} yet: leave it out, or wait for the first one")
    return lines, count


def _check(runs: list[RunLines], figures: list[str], by: str) -> None:
    known = sorted(
        {name for run in runs for line in run.lines for name, x in line.items() if isinstance(x, int | float)}
    )
    if unknown := [name for name in figures if name not in known]:
        raise UserError(f"--figures={unknown[0]} is in no line of these runs; they have {', '.join(known)}")
    if not any(run.has(AXES[by].field) for run in runs):
        raise UserError(f"--by={by}: none of these runs has counted it; take --by=step")


def _write(runs: list[RunLines], figures: list[str], by: str, output: str, notes: list[str]) -> int:
    from pretrainax.reporting import overlay_page, overlay_picture  # here: matplotlib takes long to import

    for note in notes:
        print(visible(note), file=sys.stderr)
    cli.folder("output", os.path.dirname(output) or ".")
    picture, page = f"{output}.png", f"{output}.html"
    overlay_picture.draw(picture, runs, figures, by, notes)
    with open(picture, "rb") as f:
        text = overlay_page.render(runs, figures, by, notes, f.read())
    with open(page, "w", encoding="utf-8") as f:
        f.write(text)
    print(visible(named(f"wrote {picture} and {page}")))
    return 0


if __name__ == "__main__":
    main()
