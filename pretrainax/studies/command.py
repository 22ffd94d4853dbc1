"""Runs a study from its file to its findings."""

import contextlib
import functools
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Optional

import jax
import numpy as np

from pretrainax.config import RunFailed
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject
from pretrainax.runtime import folders
from pretrainax.runtime.signals import PREEMPTED
from pretrainax.runtime.workdir_lock import WorkdirLock
from pretrainax.studies import estimate, measures  # noqa: F401  registers the classes that a study file names
from pretrainax.studies.budgets import lengths_of
from pretrainax.studies.checks import check_study
from pretrainax.studies.findings import findings_of, without_times
from pretrainax.studies.jobs import Results
from pretrainax.studies.outcomes import FinalRun, Findings, Outcome, Trial
from pretrainax.studies.plan import Plan, extended, has_plan, read_plan, with_texts, write_plan
from pretrainax.studies.queue import Interrupted, Worker, measure_speeds, run_jobs
from pretrainax.studies.report import write_report
from pretrainax.studies.study import Study
from pretrainax.studies.study_file import raise_problems, read_study
from pretrainax.studies.times import times_of, write_times
from pretrainax.studies.verdicts import judge, look_ranges

_FINDINGS = "findings.json"


def run(path: str, workdir: str, topology: Optional[str], go: bool) -> int:
    """Prints the estimate of a study and, if `go`, runs it; returns the exit code: 0, or 75 after a signal.

    Args:
      path: the study file.
      workdir: local folder of the study.
      topology: machine whose hours and price to estimate; None: `budget.machine`.

    Raises:
      UserError: the file, a config or the data is invalid.
      RunFailed: a timed run failed.
    """
    study = read_study(path)
    experiments = check_study(study, path)
    if problems := [line for measure in study.measures for line in measure.differences(experiments)]:
        raise_problems(path, problems)
    os.makedirs(workdir, exist_ok=True)
    with contextlib.suppress(Interrupted), Worker(workdir) as worker:
        with planning_lock(workdir):
            plan = _plan(study, workdir, lambda: measure_speeds(study, workdir, worker))
            speeds = measure_speeds(study, workdir, worker)
            if go:
                write_plan(workdir, plan)
        print(estimate.report(plan, speeds, topology or study.budget.machine), flush=True)
        if not go:
            return 0
        results = Results(plan, workdir)
        for seeds in look_ranges(study):
            left = functools.partial(estimate.remaining_seconds, plan, speeds, results)
            if code := run_jobs(functools.partial(results.next_jobs, seeds), workdir, worker, left):
                return code
            findings = findings_of(results, seeds)
            if judge(study, findings)[0].is_decided:  # a study with one look has no further look in any case
                break
        write_atomically(os.path.join(workdir, _FINDINGS), findings_json(without_times(findings, study)))
        write_times(workdir, study, findings, times_of(results, findings))
        print(write_report(workdir, study, findings, estimate.facts(study)))
        print(estimate.time_line(plan, speeds, results), file=sys.stderr)
        return 0
    return PREEMPTED


def run_command(name: str, workdir: str, go: bool, run: Callable[[str], int]) -> int:
    """Runs the command `name` in the local folder of its workdir, and prints how to start or to resume it.

    Args:
      workdir: a folder or a URL.
      go: whether the command starts the runs.
      run: takes the local folder and returns the exit code.
    """
    # The worker uses the devices; this process only counts FLOPs and plans.
    jax.config.update("jax_platforms", "cpu")
    with local_workdir(workdir) as folder:
        code = run(folder)
    words = shlex.join(["pretrainax", name, *sys.argv[1:]])
    if code == PREEMPTED:
        print(f"to resume: {words}", file=sys.stderr)
    elif not go:
        print(f"to start: {words} --go", file=sys.stderr)
    return code


@contextlib.contextmanager
def local_workdir(workdir: str) -> Iterator[str]:
    """Yields the local folder of a study; for a URL, a link to the working copy, which this process uploads.

    The link hides the copy from the worker process, which would otherwise synchronize it with the store, too.
    """
    with folders.local_folder(workdir) as folder:
        if folder == workdir:
            yield folder
            return
        with tempfile.TemporaryDirectory(prefix="study-") as parent:
            link = os.path.join(parent, "study")
            os.symlink(folder, link)
            yield link


@contextlib.contextmanager
def planning_lock(workdir: str) -> Iterator[None]:
    """Locks a workdir while this process times runs and writes the plan; waits for other processes."""
    while True:
        lock = WorkdirLock(os.path.join(workdir, "planning"))
        try:
            lock.__enter__()
        except RunFailed:
            time.sleep(1.0)
            continue
        with contextlib.ExitStack() as stack:
            stack.push(lock.__exit__)
            yield
        return


def _plan(study: Study, workdir: str, speeds: Callable[[], Mapping[str, JsonObject]]) -> Plan:
    """Returns the plan of a new study, or the stored plan of a started study with the additions of its file.

    Args:
      speeds: measures the speeds of the arms; called only if the budget is a time on this machine.

    Raises:
      UserError: changes of the file after the start are not only additions, a config or a text changed, or the budget
        cannot be converted to steps.
    """
    plan = with_texts(extended(read_plan(workdir), study) if has_plan(workdir) else Plan(study, {}))
    if all(arm.name in plan.lengths for arm in study.arms):
        return plan
    is_time = study.budget.seconds is not None and study.budget.machine is None
    step_seconds = {name: speed["step_seconds"] for name, speed in speeds().items()} if is_time else {}
    return plan._replace(lengths=lengths_of(study, step_seconds) | plan.lengths)


def findings_json(findings: Findings) -> str:
    """Formats findings as JSON; equal findings have equal bytes."""
    return json.dumps(_to_json(findings), indent=1) + "\n"


def _to_json(value: object) -> object:
    """Converts findings to JSON values."""
    if isinstance(value, Findings | FinalRun | Trial | Outcome):
        return _to_json(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_to_json(item) for item in value] if isinstance(value, list | tuple) else value
