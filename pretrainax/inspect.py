"""Shows training rows as text: `python -m pretrainax.inspect --config=… [--count=4] [--at=STEP] [--html=FILE]`.

Prints the first rows of a run. Symbols show the effect of the objective on each token, such as masking. A table
compares the rates measured in the batches with the rates that the config implies. `--at=STEP` shows the rows of a later
step; in a run with config.phases, these are the rows of the phase that contains the step. The exit code is 1 if a
measured rate is out of range, otherwise 0.

`--widths=64,128,256` checks instead whether the config transfers to other widths: it trains each width for a few steps
and compares the sizes of activations and updates (`pretrainax.scaling.coordinates`). The exit code is 1 if a size
depends on the width. `--picture=FILE` draws the sizes.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Optional

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError, phase_at, phases_of
from pretrainax.data.inspection import check, page, terminal
from pretrainax.data.inspection.row_view import TokenTexts, View, row_views
from pretrainax.data.pipeline import phase_batches
from pretrainax.data.preparation.prepare import prepare
from pretrainax.files.outputs import output_file
from pretrainax.files.paths import define_path
from pretrainax.storage.places import with_urls

_COUNT = flags.DEFINE_integer("count", 4, "Number of rows to show", lower_bound=0)
_AT = flags.DEFINE_integer("at", 1, "Step whose rows are shown; the first step is 1", lower_bound=1)
_HTML = define_path("html", None, "HTML file to write, with the same rows and table")

_WIDTHS = flags.DEFINE_list("widths", None, "Widths (d_model) of a coordinate check, such as 64,128,256,512,1024")
_PICTURE = define_path("picture", None, "PNG file to write, with --widths")


def main() -> int:
    """Prints training rows, and a table of measured and expected statistics of the rows. Returns the exit code."""
    for name in ("count", "at", "html") if _WIDTHS.value else ("picture",):
        if flags.FLAGS[name].present:
            word = "with" if _WIDTHS.value else "without"
            raise UserError(f"--{name} has no effect {word} --widths, which checks other widths of the model")
    if _WIDTHS.value:
        return _check_widths(_WIDTHS.value)
    experiment = cli.experiment()
    if _HTML.value:
        output_file("html", _HTML.value)
    prepared = prepare(experiment)  # may determine the number of steps
    if _AT.value > experiment.train.steps:
        raise UserError(f"--at={_AT.value} is after the last step: config.train.steps is {experiment.train.steps}")
    step = _AT.value - 1  # counted from 0
    phase = phase_at(phases_of(experiment), step)
    batches = phase_batches(experiment, prepared).at(step)
    measurement = check.measure(batches, step=step)
    views = row_views(batches, TokenTexts(prepared.tokenizer), _COUNT.value, step)
    summary = f"{phase}; {prepared.summary}" if experiment.phases else prepared.summary
    if _HTML.value:
        _write(_HTML.value, page.render(cli.config_name(), summary, measurement, views))
    phase_name = str(phase) if experiment.phases else None
    if cli.prints_json():
        values = {"config": cli.config_name(), "step": _AT.value, "phase": phase_name, **check.values(measurement)}
        cli.print_json({**values, "views": [view.values() for view in views]})
    else:
        _print_tables(phase_name, views, measurement)
    check.check(measurement, phase.experiment.objective)
    return 0


def _check_widths(flag: Sequence[str]) -> int:
    """Prints, and with --picture draws, the sizes of activations and updates in all widths. Returns the exit code."""
    from pretrainax.scaling import coordinates, coordinates_report  # import JAX

    if not all(word.isdecimal() and int(word) > 0 for word in flag) or len({*map(int, flag)}) < max(len(flag), 2):
        raise UserError(f"--widths={','.join(flag)} is not a list of at least two different widths, such as 64,128,256")
    if _PICTURE.value:
        output_file("picture", _PICTURE.value)
    widths = sorted(map(int, flag))
    sizes = coordinates.measure(cli.experiment(files=False), widths)
    if cli.prints_json():
        cli.print_json({"config": cli.config_name(), "widths": widths, "sizes": [x.values() for x in sizes]})
    else:
        print(coordinates_report.table(widths, sizes))
    if _PICTURE.value:
        coordinates_report.draw(_PICTURE.value, widths, sizes)
        print(with_urls(f"wrote {_PICTURE.value}"), file=sys.stderr)
    return int(any(x.verdict == "NOT FLAT" for x in sizes))


def _print_tables(phase_name: Optional[str], views: Sequence[View], measurement: check.Measurement) -> None:
    use_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size((100, 24)).columns
    if phase_name:
        print(phase_name)
    for view in views:
        print("\n" + terminal.render(view, use_colours, width))
    print("\n" + terminal.table(measurement))


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
    except OSError as e:
        raise UserError(f"--html={path} cannot be written: {e.strerror}") from e
    print(with_urls(f"wrote {path}"), file=sys.stderr if cli.prints_json() else sys.stdout)


if __name__ == "__main__":
    cli.run(main, has_json=True, run_flags=("config",))
