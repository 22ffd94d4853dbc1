"""Performs the jobs of a study: trains runs and computes measures, and writes result files."""

import json
import math
import os
import shlex
import tempfile
import time
from collections.abc import Callable
from typing import Optional

import jax
import numpy as np

from pretrainax.config import Diverged, Experiment, RunFailed, UserError
from pretrainax.config.metric import larger_is_better
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.run_lines import with_seconds
from pretrainax.runtime.signals import PREEMPTED
from pretrainax.studies import measures  # noqa: F401  registers the classes that a study file names
from pretrainax.studies.arms import VALIDATIONS, configured, fingerprint, length_flags, untrained_flags
from pretrainax.studies.jobs import RUN, Job, Results, experiment_of, run_flags
from pretrainax.studies.outcomes import MeasureContext, Outcome
from pretrainax.studies.plan import Plan
from pretrainax.studies.stop_at import StopAt
from pretrainax.studies.study import Arm, Measure, Study
from pretrainax.training.metrics import read_metrics

Train = Callable[[Experiment, str], int]  # trains a run in a folder and returns the exit code
_SPEED_STEPS = 3 * VALIDATIONS, 9 * VALIDATIONS  # steps of the two timed runs; both have VALIDATIONS validations


def perform(plan: Plan, workdir: str, job: Job, train_run: Train) -> int:
    """Performs a job and writes its result file; returns 0, or 75 if a signal paused the training.

    If a run diverges or fails with an exit code, its result file has the reason.

    Raises:
      UserError: the config or an input is invalid.
      RunFailed: a cause outside the run, for example a full disk, ended it; a repeated call resumes it.
    """
    run, started = os.path.join(workdir, job.folder, RUN), time.perf_counter()
    experiment = experiment_of(plan, job)
    if job.step in ("part", "train"):
        result = _train(plan, job, experiment, run, train_run)
    else:
        result = _measure(plan, workdir, job, experiment, train_run)
    if result is None:
        return PREEMPTED
    result |= {"seconds": time.perf_counter() - started, "machine": _machine()}
    write_atomically(os.path.join(workdir, job.result), json.dumps(result, indent=1) + "\n")
    return 0


def _measure(plan: Plan, workdir: str, job: Job, experiment: Experiment, train_run: Train) -> JsonObject:
    """Computes all measures of a finished run, or chooses the settings of an arm; returns the content of the result."""
    run, choices = os.path.join(workdir, job.folder, RUN), Results(plan, workdir).choices(job)
    chosen, is_first = {}, (job.arm, job.seed) == (plan.study.arms[0].name, plan.study.final.seed)
    try:
        for measure in plan.study.measures:
            context = context_of(plan.study, choices.get(measure.name, {}), job.seed, train_run=train_run)
            if job.step == "measure":
                if is_first:  # before the outcomes: `ValidationLoss` then opens the run once
                    measure.baselines(run, experiment, context)
                _outcomes(measure, run, experiment, context)
            elif measure.chooses:
                chosen[measure.name] = measure.choose(run, experiment, context)
    except Diverged as e:
        return {"failed": str(e)}
    return {"failed": "", "choices": chosen}


def _outcomes(measure: Measure, run: str, experiment: Experiment, context: MeasureContext) -> list[Outcome]:
    """Computes a measure of a run; raises Diverged if a number is not finite, because such a run has no rank."""
    found = measure.outcomes(run, experiment, context)
    for value, changes in found:
        if not (math.isfinite(value) and (changes is None or np.isfinite(changes).all())):
            raise Diverged(f"{measure.name} is not finite ({value:g})")
    return found


def context_of(
    study: Study, choice: JsonObject, seed: int, is_tuning: bool = False, train_run: Optional[Train] = None
) -> MeasureContext:
    """Returns the context of a measure of a run with the pretraining seed `seed`.

    Each pretraining seed has different downstream seeds, which all arms share. A trial has one downstream seed.
    """
    final, tuning = study.final, study.tuning
    first = (seed - final.seed) * final.downstream_seeds
    seeds = tuple(range(first, first + final.downstream_seeds))
    if is_tuning and tuning is not None:
        seeds = (tuning.seed,)
    return MeasureContext(seeds, is_tuning, choice, train_run)


def _train(plan: Plan, job: Job, experiment: Experiment, run: str, train_run: Train) -> Optional[JsonObject]:
    """Trains a run, or continues it; returns the content of the result file, or None if a signal paused the run."""
    if job.stop is not None:
        experiment.callbacks = (*experiment.callbacks, StopAt(job.stop))
    reason = attempt(experiment, run, job.folder, train_run)
    if reason is None:
        return None
    lines = lines_of(run)
    trained = [line for line in lines if line["split"] == "train"]
    arm, flags = plan.arm(job.arm), run_flags(plan, job)
    result = {
        "failed": reason,
        "steps": trained[-1]["step"] if trained else 0,
        "flops": trained[-1]["flops"] if trained else 0.0,
        "fingerprint": fingerprint(experiment_of(plan, job)),
        "command": shlex.join(["pretrainax", "train", f"--config={arm.config}", *arm.flags, *flags]),
    }
    if job.is_tuning:
        result["cost"] = None if reason else _cost(plan, job, experiment, run, lines, train_run)
    return result


def attempt(experiment: Experiment, run: str, folder: str, train_run: Train) -> Optional[str]:
    """Trains a run; returns the reason why it failed, "" if it did not, or None if a signal paused it.

    Args:
      run: the run's workdir.
      folder: name of the run in messages.

    Raises:
      UserError: the config or an input of the run is invalid.
    """
    try:
        code = train_run(experiment, run)
    except Diverged as e:
        return str(e)
    if code == UserError.exit_code:
        raise UserError(f"{folder} has an invalid config or input: its log.txt has the reason")
    if code == PREEMPTED:
        return None
    return f"exit code {code}; its log.txt has the reason" if code else ""


def lines_of(run: str) -> list[JsonObject]:
    """Returns the lines of metrics.jsonl; an untrained run may have none."""
    return read_metrics(path) if os.path.exists(path := os.path.join(run, "metrics.jsonl")) else []


def _cost(plan: Plan, job: Job, experiment: Experiment, run: str, lines: list[dict], train_run: Train) -> float | None:
    """Returns the value of the tuning measure of a trial, negated if larger values are better; None if it diverged.

    The value of a part, and of a study whose `tuning.measure` names no measure, is the validation metric that selects
    checkpoints.
    """
    assert plan.study.tuning is not None
    for measure in plan.study.measures:
        if measure.name == plan.study.tuning.measure and job.step == "train":
            try:
                found = _outcomes(measure, run, experiment, context_of(plan.study, {}, job.seed, True, train_run))
            except Diverged:
                return None
            return signed(measure.larger_is_better, sum(outcome.value for outcome in found) / len(found))
    value = next((line[experiment.select_by] for line in reversed(lines) if line["split"] == "valid"), None)
    return None if value is None else signed(larger_is_better(experiment.select_by), value)


def signed(larger_is_better: bool, value: float) -> float:
    """Converts a value of a measure to a cost, or a cost to a value."""
    return -value if larger_is_better else value


def measure_speed(
    study: Study, arm: Arm, train_run: Train, twin: Optional[JsonObject] = None, validations: int = VALIDATIONS
) -> JsonObject:
    """Times short runs of an arm, and its measures, in a temporary folder.

    The first run compiles the programs, which later runs share or read from the compilation cache. A step directly
    after a validation takes longer. Runs of two lengths have equally many validations, so the time of an update is the
    difference of their times. The runs of an untrained arm end before their first update.

    Args:
      twin: the result for an arm whose measures take the same time; None: the measures are timed.
      validations: number of validations of a run.

    Returns:
      "step_seconds": seconds of an update, without validations and checkpoints; 0 for an untrained arm.
      "fixed_seconds": seconds of a run apart from its updates.
      "choose_seconds": seconds of choosing the settings of the measures, once for an arm.
      "measure_seconds": seconds of the measures of a final run.
      "trial_seconds": seconds of the measure that scores a trial; 0 if no measure scores trials.
      "devices": number and kind of the devices.

    Raises:
      RunFailed: a run failed, for example because its loss is not finite.
    """
    short, long = (0, 0) if arm.untrained else _SPEED_STEPS
    choose_seconds, measure_seconds = (twin["choose_seconds"], twin["measure_seconds"]) if twin else (0.0, 0.0)
    trial_seconds = 0.0
    with tempfile.TemporaryDirectory(prefix="study-speed-") as parent:
        _timed_run(arm, short, validations, os.path.join(parent, "first"), train_run)
        folder = os.path.join(parent, "second")
        experiment, run_seconds, short_seconds = _timed_run(arm, short, validations, folder, train_run)
        for measure in () if twin else study.measures:
            context = context_of(study, {}, study.final.seed, train_run=train_run)
            timed = measure.timed(folder, experiment, context)
            choose_seconds += timed.choose
            measure_seconds += timed.outcomes
            if study.tuning and measure.name == study.tuning.measure and not arm.untrained:
                trial_seconds = timed.trial
        step_seconds = 0.0
        if not arm.untrained:
            _, _, long_seconds = _timed_run(arm, long, validations, os.path.join(parent, "third"), train_run)
            step_seconds = max(long_seconds - short_seconds, 0.0) / (long - short)
    return {
        "step_seconds": step_seconds,
        "fixed_seconds": max(run_seconds - short * step_seconds, 0.0),
        "choose_seconds": choose_seconds,
        "measure_seconds": measure_seconds,
        "trial_seconds": trial_seconds,
        "devices": _machine(),
    }


def _timed_run(
    arm: Arm, steps: int, validations: int, folder: str, train_run: Train
) -> tuple[Experiment, float, float]:
    """Trains a short run; returns its config, its seconds, and the seconds of its steps without compilation."""
    if steps:
        flags = [*length_flags(configured(arm), steps, validations), f"--config.train.log_every={VALIDATIONS}"]
        experiment = configured(arm, flags)
    else:
        experiment = configured(arm, untrained_flags())
        experiment.callbacks = (*experiment.callbacks, StopAt(0))
    started = time.perf_counter()
    if code := train_run(experiment, folder):
        raise RunFailed(f"the timed run of the arm {arm.name} ended with exit code {code}")
    elapsed = time.perf_counter() - started
    lines = with_seconds(lines_of(folder))
    return experiment, elapsed, (lines[-1]["seconds"] or 0.0) if lines else 0.0


def _machine() -> str:
    """Returns the number and kind of the devices."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
