"""Shows training rows as text: `python -m pretrainax.inspect --config=… [--count=4] [--at=STEP] [--html=FILE]`.

Prints the first rows of a run. Symbols mark the effect of the objective on each token, such as masking. A table
compares the measured rates of the batches with the expected rates of the config. `--at=STEP` shows the rows of a later
step, in the phase of that step. Exit code 1 if a measured rate is out of range, else 0.
"""

import os
import shutil
import sys

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError, phase_at, phases_of
from pretrainax.data.inspection import check, page, terminal
from pretrainax.data.inspection.row_view import TokenTexts, row_views
from pretrainax.data.pipeline import phase_batches
from pretrainax.data.preparation.prepare import prepare
from pretrainax.files.paths import define_path
from pretrainax.storage.places import with_urls

_COUNT = flags.DEFINE_integer("count", 4, "Number of rows to show", lower_bound=0)
_AT = flags.DEFINE_integer("at", 1, "Step whose rows are shown; the first step is 1", lower_bound=1)
_HTML = define_path("html", None, "HTML file to write, with the same rows and table")


def main() -> int:
    experiment = cli.experiment()
    if _AT.value > experiment.train.steps:
        raise UserError(f"--at={_AT.value} is after the last step: config.train.steps is {experiment.train.steps}")
    before = _AT.value - 1  # number of updates before the step
    phase = phase_at(phases_of(experiment), before)
    if _HTML.value:
        cli.folder("html", os.path.dirname(_HTML.value) or ".")
    prepared = prepare(experiment)
    batches = phase_batches(experiment, prepared).at(before)
    measured = check.measure(batches, step=before)
    views = row_views(batches, TokenTexts(prepared.tokenizer), _COUNT.value, before)
    summary = f"{phase}; {prepared.summary}" if experiment.phases else prepared.summary
    if _HTML.value:
        _write(_HTML.value, page.render(cli.config_name(), summary, measured, views))
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size((100, 24)).columns
    if experiment.phases:
        print(phase)
    for one in views:
        print("\n" + terminal.render(one, colours, width))
    print("\n" + terminal.table(measured))
    check.check(measured, phase.experiment.objective)
    return 0


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
    except OSError as e:
        raise UserError(f"--html={path} cannot be written: {e.strerror}") from e
    print(with_urls(f"wrote {path}"))


if __name__ == "__main__":
    cli.run(main)
