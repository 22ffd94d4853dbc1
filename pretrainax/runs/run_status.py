"""Describes the progress of runs from the files in their folders: steps, time, goodput, health and samples."""

import os
import time
from collections.abc import Sequence

from pretrainax.config.metric import reported
from pretrainax.reporting.run_lines import RunLines
from pretrainax.reporting.runs_table import Report, Table
from pretrainax.reporting.units import elapsed, percent
from pretrainax.runs.health import collapses, health_line
from pretrainax.runs.run_reports import METRICS_FILE, SAMPLES_FILE
from pretrainax.runtime.goodput import GOODPUT_FILE, read_goodput

_NORM = "gradient_norm/stack="
_SILENT_LOGS = 10  # a run that has written no line for the time of 10 log lines has probably stopped
_MOST_CHARACTERS = 20_000  # maximum number of characters of the samples of a run
_SILENT_SECONDS = 120.0  # minimum of this time, because a validation or a checkpoint may take minutes


def status_table(report: Report, folders: Sequence[str]) -> Table:
    """Returns a row for each run of a report.

    Args:
      folders: the folders of the runs, in the order of the report.
    """
    rows = [["", "run", "state", "step", "train loss", "validation loss", "remaining", "goodput", "health"]]
    for i, (run, folder) in enumerate(zip(report.runs, folders, strict=True)):
        experiment = report.records[i].experiment
        rows.append([str(i + 1), run.name, *_cells(run, folder, experiment and experiment.train.steps)])
    return rows


def latest_samples(report: Report, folders: Sequence[str]) -> list[tuple[str, str]]:
    """Returns (name, text) for each run that has written samples.

    Args:
      folders: the folders of the runs, in the order of the report.
    """
    found = []
    for run, folder in zip(report.runs, folders, strict=True):
        if os.path.isfile(path := os.path.join(folder, SAMPLES_FILE)):
            with open(path, encoding="utf-8") as f:
                found.append((run.name, f.read(_MOST_CHARACTERS)))
    return found


def _cells(run: RunLines, folder: str, steps: int | None) -> list[str]:
    step = run.lines[-1]["step"]
    goodput, is_complete = read_goodput(folder)
    losses = [run.last(split, "loss") for split in ("train", "valid")]
    state, remaining = _state(run, folder, is_complete), "unknown"
    if steps and (seconds := run.last("train", "step_seconds")) is not None:
        remaining = "" if state == "complete" else elapsed(max(steps - step, 0) * seconds)
    return [
        state,
        f"{step:,} of {steps:,}" if steps else f"{step:,}",
        *("none" if loss is None else reported("loss", loss) for loss in losses),
        remaining,
        "unknown" if goodput is None else percent(goodput, 1),
        _health(run, step / steps if steps else 0.0),
    ]


def _state(run: RunLines, folder: str, is_complete: bool) -> str:
    """Returns "complete", "running", or, if the last line of metrics.jsonl is old, the time since that line.

    If a command extends a complete run, it writes config.json again before its first line.
    """
    if is_complete and _changed(folder, "config.json") <= _changed(folder, GOODPUT_FILE):
        return "complete"
    silent = time.time() - max(_changed(folder, METRICS_FILE), _changed(folder, "config.json"))
    steps = [0, *(line["step"] for line in run.lines if line["split"] == "train")][-2:]
    log_seconds = (run.last("train", "step_seconds") or 0.0) * (steps[-1] - steps[0])
    return "running" if silent < max(_SILENT_SECONDS, _SILENT_LOGS * log_seconds) else f"no line for {elapsed(silent)}"


def _changed(folder: str, name: str) -> float:
    """Returns the time of the last change of a file of a run; 0 if it does not exist."""
    path = os.path.join(folder, name)
    return os.path.getmtime(path) if os.path.exists(path) else 0.0


def _health(run: RunLines, progress: float) -> str:
    """Returns the health line of the last validation, after a warning if the model has collapsed."""
    valid = next((line for line in reversed(run.lines) if line["split"] == "valid"), {})
    train = next((line for line in reversed(run.lines) if line["split"] == "train"), {})
    norms = {name.removeprefix(_NORM): x for name, x in train.items() if name.startswith(_NORM) and x is not None}
    warning = "COLLAPSED, " if collapses(valid, progress) else ""
    return warning + health_line(valid, norms).removeprefix("health: ")
