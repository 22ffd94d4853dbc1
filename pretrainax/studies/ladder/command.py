"""Runs a ladder from its file to the score of its prediction."""

import contextlib
import functools
import glob
import json
import os
from collections.abc import Mapping

from pretrainax.config import Experiment, UserError, to_json
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.errors import counted
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import clock, large_number
from pretrainax.runtime.signals import PREEMPTED
from pretrainax.scaling.fit import Fit, Known, fit_runs, write_law
from pretrainax.studies.command import planning_lock
from pretrainax.studies.jobs import RUN
from pretrainax.studies.ladder import registration
from pretrainax.studies.ladder.jobs import next_jobs, result_of
from pretrainax.studies.ladder.ladder import Ladder, read_ladder
from pretrainax.studies.ladder.report import write_report
from pretrainax.studies.ladder.rungs import Rungs, list_rungs
from pretrainax.studies.plan import check_texts, check_unchanged, sources_of, texts_of
from pretrainax.studies.queue import Interrupted, Worker, measure_speeds, run_jobs
from pretrainax.studies.study import Budget, Contrast, Study

_LADDER = "ladder.json"  # the content of the ladder file, its config, and the fingerprints of the text
_BASE, _TEXTS = "base", "texts"


def run(path: str, workdir: str, go: bool) -> int:
    """Prints the estimate of a ladder and, if `go`, runs it; returns the exit code: 0, or 75 after a signal.

    Args:
      path: the ladder file.
      workdir: local folder of the ladder.

    Raises:
      UserError: the file, a config or the data is invalid, the runs are too few for a law, or the held-out run exists
        without a prediction.
      RunFailed: a timed run failed.
    """
    ladder, base = read_ladder(path)
    os.makedirs(workdir, exist_ok=True)
    texts = texts_of(sources_of(base))
    _check_same(ladder, base, texts, workdir, path)
    rungs = list_rungs(ladder, base)
    if rungs.held_out is not None and not registration.is_registered(workdir):
        registration.check_not_started(workdir, rungs.held_out)  # now, not hours later when the prediction is made
    with contextlib.suppress(Interrupted), Worker(workdir) as worker:
        with planning_lock(workdir):
            speeds = measure_speeds(_timed(rungs), workdir, worker, validations=1)
            if go:
                content = to_json(ladder) | {_BASE: to_json(base), _TEXTS: texts}
                write_atomically(os.path.join(workdir, _LADDER), json.dumps(content, indent=1) + "\n")
        print(estimate(rungs, speeds), flush=True)
        if not go:
            return 0
        if code := run_jobs(functools.partial(next_jobs, rungs.runs, workdir), workdir, worker):
            return code
        law_fit, held_out, registered, score = fit_rungs(rungs, workdir), rungs.held_out, None, None
        write_law(law_fit, workdir)
        if held_out is not None:
            registered = registration.register(workdir, law_fit, held_out)
            print(f"registered {registration.PREDICTION}, SHA-256 {registered.sha256}", flush=True)
            if code := run_jobs(functools.partial(next_jobs, [held_out], workdir), workdir, worker):
                return code
            score = registration.score(workdir, registered, held_out)
            write_law(law_fit, workdir, registration.prediction_of(law_fit, held_out), score["measured"])
        print(write_report(workdir, ladder, rungs, law_fit, score))
        return 0
    return PREEMPTED


def fit_rungs(rungs: Rungs, workdir: str) -> Fit:
    """Fits the law to the finished runs.

    Raises:
      UserError: there are too few runs, or they are not comparable.
    """
    folders = {os.path.join(workdir, rung.folder, RUN): rung for rung in rungs.runs}
    failed = [
        f"{rung.folder}: {result['failed']}"
        for rung in rungs.runs
        if (result := result_of(rung.folder, workdir)) and result["failed"]
    ]
    pattern = os.path.join(glob.escape(workdir), "rungs", "*", "*", "*", RUN)
    known = {folder: Known(rung.length.epochs, os.path.dirname(rung.folder)) for folder, rung in folders.items()}
    found = fit_runs(pattern, known)
    return found._replace(left_out=(*found.left_out, *failed))


def estimate(rungs: Rungs, speeds: Mapping[str, JsonObject]) -> str:
    """Formats the runs of a ladder with their steps, FLOPs, epochs and time on this machine."""
    rows, total = [("run", "steps", "new steps", "tokens", "epochs", "FLOPs", "new FLOPs", "time here")], 0.0
    runs = [*rungs.runs, *([rungs.held_out] if rungs.held_out else [])]
    for rung in runs:
        speed = speeds[rung.arm.name]
        seconds = rung.new_steps * speed["step_seconds"] + speed["fixed_seconds"]
        total += seconds
        length = rung.length
        rows.append(
            (
                rung.folder,
                f"{length.steps:,}",
                f"{rung.new_steps:,}",
                large_number(length.text_tokens),
                f"{length.epochs:.2f}",
                f"{length.flops:.3g}",
                f"{rung.new_flops:.3g}",
                clock(seconds),
            )
        )
    flops = sum(rung.new_flops for rung in runs)
    sums = f"total: {counted(len(runs), 'run')}, {flops:.3g} FLOPs, {clock(total)} on this machine"
    return f"{text_table(rows, '<>')}\n{sums}"


def _timed(rungs: Rungs) -> Study:
    """Returns a study with one arm per size, so that the queue can time short runs of each size."""
    return Study("", tuple(rungs.sizes.values()), Budget(), (), Contrast("", "", ""))


def _check_same(ladder: Ladder, base: Experiment, texts: Mapping[str, str], workdir: str, path: str) -> None:
    """Raises UserError if the ladder in a workdir started with another file, another config or another text."""
    stored = os.path.join(workdir, _LADDER)
    if not os.path.exists(stored):
        return
    before, after = read_object(stored), json.loads(json.dumps(to_json(ladder)))
    if changed := [name for name in after if before.get(name) != after[name]]:
        raise UserError(
            f"{path} changed after the start in {', '.join(changed)}: restore the file, or set another --workdir"
        )
    if _BASE in before:
        check_unchanged(ladder.config, before[_BASE], base)
    check_texts(before.get(_TEXTS, {}), texts)
