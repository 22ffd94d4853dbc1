"""Writes the times of a study's final runs: times.html, times.md and times.json.

Times depend on the machine and its load. The files of the report contain no times, so their bytes do not depend on the
order of the runs.
"""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.run_lines import SECONDS, with_seconds
from pretrainax.reporting.units import clock
from pretrainax.runtime.goodput import seconds_of
from pretrainax.studies.jobs import Results
from pretrainax.studies.outcomes import FinalRun, Findings
from pretrainax.studies.report import Report, Section, contrast_sections, curves_of, filled, write_files
from pretrainax.studies.report_tables import Table
from pretrainax.studies.study import Study
from pretrainax.studies.verdicts import judge
from pretrainax.training.metrics import read_metrics

_NOTES = (
    "These values depend on the machines and their load. The report of the study has none of them.",
    "The time of a run is that of all its starts, without its measures. The time in steps has no compilation, "
    "evaluations and checkpoints.",
)


class RunTime(NamedTuple):
    """The times of a final run."""

    run: FinalRun  # whose lines have "seconds", the time in steps
    machine: str  # number and kind of its devices
    seconds: float  # total time of all starts of the run, without its measures


def times_of(results: Results, findings: Findings) -> list[RunTime]:
    """Reads the times of the final runs from the workdir of the study."""
    found = []
    for run in findings.runs:
        result = results.of(results.final(run.arm, run.seed, "train", findings.chosen)) or {}
        folder = os.path.join(results.workdir, run.folder)
        path = os.path.join(folder, "metrics.jsonl")
        lines: Sequence[JsonObject] = with_seconds(read_metrics(path)) if run.steps else ()
        found.append(RunTime(run._replace(lines=lines), result.get("machine", "unknown"), seconds_of(folder)))
    return found


def write_times(folder: str, study: Study, findings: Findings, times: Sequence[RunTime]) -> None:
    """Writes times.html, times.md and times.json: the times of each run, curves by time, and the measures of time."""
    all_verdicts = judge(study, findings)
    verdicts = [verdict for verdict in all_verdicts if verdict.contrast.measure in study.untested_times]
    sections = [
        Section("Runs", _NOTES, _table(times)),
        Section("Curves", plots=list(curves_of([one.run for one in times], ["time"]))),
        *contrast_sections(study, findings, verdicts, study.untested_times),
    ]
    write_files(folder, "times", study, Report(f"Times: {study.question}", all_verdicts[:1], filled(sections)))


def _table(times: Sequence[RunTime]) -> Table:
    """Lists the times of each run."""

    def rows() -> Iterator[list[str]]:
        for run, machine, seconds in times:
            in_steps = run.lines[-1][SECONDS] if run.lines else 0.0
            yield [run.arm, str(run.seed), machine, clock(seconds), "unknown" if in_steps is None else clock(in_steps)]

    return Table(["arm", "seed", "machine", "time", "time in steps"], list(rows()))
