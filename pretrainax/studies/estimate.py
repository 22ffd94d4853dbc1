"""Estimates a study before its start: runs, FLOPs, hours on this machine, and hours and price on a named machine."""

import collections
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Optional

from pretrainax.config import UserError, resolve_auto
from pretrainax.files.json_files import JsonObject
from pretrainax.planning.search import estimate_run
from pretrainax.planning.topologies import Topology
from pretrainax.reporting.tables import text_table
from pretrainax.reporting.units import clock, large_number, with_decimals
from pretrainax.studies.arms import configured, length_flags
from pretrainax.studies.contrasts import Noise
from pretrainax.studies.jobs import Finished, Results
from pretrainax.studies.plan import Plan
from pretrainax.studies.power import TARGET, equivalence_power, smallest_effect
from pretrainax.studies.study import Arm, Study, Tuning
from pretrainax.studies.verdicts import planned_level


class Runs(NamedTuple):
    """The number of runs of an arm; all trained arms have the same number."""

    trials: int  # tuning runs without widening
    scored: int  # number of trials that do not stop early
    trial_runs: float  # total length of the trials in whole runs: a trial that stops early is a part of a run
    finals: int


class ArmEstimate(NamedTuple):
    """The costs of all runs of an arm."""

    steps: int  # steps of one run
    flops: float  # FLOPs of all runs
    trial_seconds: float  # time of all trials on this machine
    final_seconds: float  # time of all final runs and their measures

    @property
    def seconds(self) -> float:
        return self.trial_seconds + self.final_seconds


def runs_of(study: Study, arm: Arm) -> Runs:
    """Counts the runs of an arm, without those that widen a grid."""
    trials, scored, tuning = 0, 0, Tuning() if study.tuning is None or arm.untrained else study.tuning
    for number, multiples in enumerate(tuning.grid.values()):
        settings = len(multiples) - (number > 0)  # later rounds have the best setting so far
        trials += settings * tuning.seeds
        scored += (-(-settings // 2) if tuning.stop_share else settings) * tuning.seeds
    return Runs(trials, scored, scored + (trials - scored) * tuning.stop_share, study.final.seeds)


def estimates(plan: Plan, speeds: Mapping[str, JsonObject]) -> dict[str, ArmEstimate]:
    """Estimates each arm's runs.

    Args:
      speeds: results of `perform.measure_speed` by arm.
    """
    found = {}
    for name, length in plan.lengths.items():
        speed, runs = speeds[name], runs_of(plan.study, plan.arm(name))
        run_seconds, fixed = length.steps * speed["step_seconds"], speed["fixed_seconds"]
        trials = runs.trial_runs * run_seconds + runs.trials * fixed + runs.scored * speed["trial_seconds"]
        finals = runs.finals * (run_seconds + fixed + speed["measure_seconds"]) + speed["choose_seconds"]
        found[name] = ArmEstimate(length.steps, (runs.trial_runs + runs.finals) * length.flops, trials, finals)
    return found


def remaining_seconds(plan: Plan, speeds: Mapping[str, JsonObject], results: Results) -> float:
    """Estimates the seconds of the unfinished jobs, without those that widen a grid.

    The estimate before the start is multiplied by the ratio of the measured to the estimated time of the arm's finished
    jobs. An arm without finished jobs has the ratio of all arms.

    Args:
      speeds: results of `perform.measure_speed` by arm.
    """
    measured: dict[str, float] = collections.defaultdict(float)
    estimated: dict[tuple[str, bool], float] = collections.defaultdict(float)  # (arm, is_tuning) -> seconds
    for job in results.finished():
        measured[job.arm] += job.seconds
        estimated[job.arm, job.is_tuning] += _job_seconds(plan, speeds[job.arm], job)
    seconds, ratio = 0.0, sum(measured.values()) / (sum(estimated.values()) or 1.0) or 1.0
    for name, whole in estimates(plan, speeds).items():
        trials, finals = estimated[name, True], estimated[name, False]
        own = measured[name] / (trials + finals) if trials + finals else ratio
        seconds += own * (max(whole.trial_seconds - trials, 0.0) + max(whole.final_seconds - finals, 0.0))
    return seconds


def _job_seconds(plan: Plan, speed: JsonObject, job: Finished) -> float:
    """Estimates the seconds of a job from the speed of its arm."""
    if job.step in ("choose", "measure"):
        return speed[f"{job.step}_seconds"]
    share = plan.study.tuning.stop_share if plan.study.tuning and job.is_tuning else 0.0
    share, scored = (share, 0.0) if job.step == "part" else (1 - share, job.is_tuning * speed["trial_seconds"])
    return share * plan.lengths[job.arm].steps * speed["step_seconds"] + speed["fixed_seconds"] + scored


def machine_cost(plan: Plan, topology: Topology) -> tuple[float, Optional[float]]:
    """Estimates (hours, price in USD) of all updates of a study on a machine; None: the price is unknown.

    Raises:
      UserError: the mesh of an arm does not fit the machine.
    """
    runs, rooflines = runs_of(plan.study, plan.study.trained[0]), []
    for arm in plan.study.trained:
        length = plan.lengths[arm.name]
        experiment = configured(arm, length_flags(configured(arm), length.steps))
        resolve_auto(experiment, length.vocabulary_size)
        rooflines.append(estimate_run(experiment, topology).roofline)
    whole, prices = runs.trial_runs + runs.finals, [roofline.price for roofline in rooflines]
    price = None if None in prices else whole * sum(filter(None, prices))
    return whole * sum(roofline.hours for roofline in rooflines), price


def report(plan: Plan, speeds: Mapping[str, JsonObject], machine: Optional[str]) -> str:
    """Formats the estimate that `pretrainax study` prints before the start.

    Args:
      machine: topology of another machine; None: only this one.
    """
    study, found = plan.study, estimates(plan, speeds)
    runs = {arm.name: runs_of(study, arm) for arm in study.arms}
    rows = [("arm", "steps", "FLOPs of a run", "text tokens", "text bytes", "epochs", "trials", "runs", "time here")]
    for name, length in plan.lengths.items():
        text = large_number(length.text_tokens), large_number(length.text_bytes), f"{length.epochs:.2f}"
        counts = str(runs[name].trials), str(runs[name].finals), clock(found[name].seconds)
        rows.append((name, f"{length.steps:,}", f"{length.flops:.4g}", *text, *counts))
    seconds = sum(estimate.seconds for estimate in found.values())
    trials, finals = sum(x.trials for x in runs.values()), sum(x.finals for x in runs.values())
    devices = next(iter(speeds.values()))["devices"]
    lines = [
        f"question: {study.question}",
        f"tokenizer: {'shared by all arms' if study.budget.tokenizer == 'shared' else 'own of each arm'}",
        text_table(rows, indent="  "),
        f"total: {trials} trials and {finals} final runs, "
        f"{sum(estimate.flops for estimate in found.values()):.4g} FLOPs, {with_decimals(seconds / 3600, 2)} hours on "
        f"this machine ({devices})",
    ]
    lines += facts(study)
    if machine is not None:
        lines.append(_machine_line(plan, machine))
    return "\n".join(lines)


def facts(study: Study) -> list[str]:
    """Returns the lines of the estimate that do not depend on a machine: the search, and the power of the seeds."""
    tuning = [] if study.tuning is None else [_tuning_line(study.tuning, len(study.trained))]
    return [*tuning, *_power_lines(study)]


def time_line(plan: Plan, speeds: Mapping[str, JsonObject], results: Results) -> str:
    """Compares the time of the finished jobs with the estimate, which now includes the trials that widened a grid."""
    jobs = list(results.finished())
    estimated = sum(_job_seconds(plan, speeds[job.arm], job) for job in jobs)
    planned = sum(one.seconds for one in estimates(plan, speeds).values())
    wider = f", of it {clock(estimated - planned)} for trials beyond the grids" if estimated > planned + 1 else ""
    return f"time of all jobs: {clock(sum(job.seconds for job in jobs))}; estimated: {clock(estimated)}{wider}"


def _tuning_line(tuning: Tuning, arms: int) -> str:
    widening = f"; a grid whose best value is at its edge adds {arms * tuning.seeds} trials" if tuning.widen else ""
    stopping = f"; the worse half of a round stops after {tuning.stop_share:.0%} of the budget"
    fields = ", then ".join(tuning.grid)
    return f"tuning: coordinate search over {fields}{stopping * bool(tuning.stop_share)}{widening}"


def _power_lines(study: Study) -> Iterator[str]:
    """Yields the smallest difference that the primary contrast finds, and the power to call equal arms equivalent."""
    level, seeds, noise = planned_level(study), study.final.seeds, Noise(study.spread or 1.0)
    unit = study.measure(study.primary.measure).unit
    size, of = smallest_effect(seeds, noise, level), "standard deviations of a paired difference over seeds"
    if study.spread is not None:
        of = f"{unit}, if the paired difference has a standard deviation of {study.spread:g} over seeds"
    yield f"smallest difference that {seeds} seeds find with {TARGET:.0%} power at level {level:.3g}: {size:.3g} {of}"
    if study.spread is not None and study.margin is not None:
        equal = equivalence_power(study.margin, seeds, noise, level)
        yield f"power to call equal arms equivalent within {study.margin:g} {unit}: {equal:.0%}"


def _machine_line(plan: Plan, machine: str) -> str:
    try:
        hours, price = machine_cost(plan, Topology.parse(machine))
    except UserError as e:
        return f"on {machine}: unknown, {e}"
    price_text = "unknown price" if price is None else f"{with_decimals(price, 2)} USD"
    return (
        f"on {machine}: {with_decimals(hours, 2)} hours of updates, {price_text} (estimated as `pretrainax plan` does)"
    )
