"""Builds the tables of a study's report: contrasts, arms, measures with baselines, costs and runs."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from pretrainax.reporting.paired import mean_interval
from pretrainax.reporting.signal_to_noise import signal_to_noise
from pretrainax.reporting.units import scientific
from pretrainax.studies.outcomes import Findings, Outcomes
from pretrainax.studies.study import Study
from pretrainax.studies.verdicts import Verdict, confidence, decimals_of


class Table(NamedTuple):
    """The cells of a table as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    grey: frozenset[int] = frozenset()  # indices of rows that cannot decide


def contrast_table(verdicts: Sequence[Verdict]) -> Table:
    """Lists each contrast with its verdict, difference, interval and number of seeds."""
    rows = []
    for v in verdicts:
        estimate, decimals = v.comparison.estimate, decimals_of(v.comparison.estimate.standard_error)
        interval = "unknown"
        if v.interval is not None:
            interval = " to ".join(f"{bound:+,.{decimals}f}" for bound in v.interval)
        value = f"{estimate.value:+,.{decimals}f}" if v.comparison.seeds else "none"
        names = f"{v.contrast.one} − {v.contrast.other}"
        numbers = value, interval, confidence(v.level), str(len(v.comparison.seeds))
        rows.append([v.contrast.measure, names, v.role, v.word or "none: exploratory", *numbers])
    return Table(["measure", "contrast", "role", "verdict", "difference", "interval", "confidence", "seeds"], rows)


def arm_table(study: Study, findings: Findings) -> Table:
    """Lists each arm with its config, tuned values, steps, seeds, and its value of the primary measure."""
    rows = []
    for arm in study.arms:
        runs = [run for run in findings.runs if run.arm == arm.name]
        steps = ", ".join(f"{steps:,}" for steps in sorted({run.steps for run in runs}))
        values = findings.chosen.get(arm.name, {})
        tuned = ", ".join(f"{name.removeprefix('config.')}={value:g}" for name, value in values.items())
        outcomes = findings.outcomes.get(study.primary.measure, {}).get(arm.name, {})
        config = " ".join((arm.config, *arm.flags))
        rows.append([arm.name, config, tuned or "none", steps or "none", str(len(outcomes)), _mean(outcomes)])
    return Table(["arm", "config", "tuned values", "steps", "seeds", study.primary.measure], rows)


def measure_table(study: Study, findings: Findings, names: Collection[str]) -> Table:
    """Lists the value of some measures for each arm, their baselines, and their signal-to-noise ratios.

    A row is grey if the noise over seeds can explain the differences between the arms.
    """
    arms, rows, grey = [arm.name for arm in study.arms], [], set()
    for measure in (measure for measure in study.measures if measure.name in names):
        of_arms = findings.outcomes.get(measure.name, {})
        baselines = findings.baselines.get(measure.name, {})
        text = "; ".join(f"{name}: {outcome.value:,.4g}" for name, outcome in baselines.items())
        found = signal_to_noise([[[x] for x in _seed_values(of_arms.get(arm, {})).values()] for arm in arms])
        noise = "unknown" if found is None else f"{found.ratio:.2g}" + ", cannot decide" * (not found.decides)
        if found is None or not found.decides:
            grey.add(len(rows))
        name = f"{measure.name}{f' ({measure.unit})' * (measure.unit not in ('', measure.name))}"
        direction = "larger" if measure.larger_is_better else "smaller"
        rows.append([name, direction, *(_mean(of_arms.get(arm, {})) for arm in arms), text or "none", noise])
    return Table(["measure", "better", *arms, "baselines", "signal-to-noise"], rows, frozenset(grey))


def cost_table(study: Study, findings: Findings) -> Table:
    """Lists the trials, the final runs and the FLOPs of each arm."""
    totals, rows = [], []
    for arm in study.arms:
        trials = [trial for trial in findings.trials if trial.arm == arm.name]
        runs = [run for run in findings.runs if run.arm == arm.name]
        tuning, final = sum(trial.flops for trial in trials), sum(run.flops for run in runs)
        stopped, failed = sum(t.stopped_early for t in trials), sum(t.value is None for t in trials)
        totals.append(tuning + final)
        counts = [str(len(trials)), str(stopped), str(failed), scientific(tuning), str(len(runs))]
        rows.append([arm.name, *counts, scientific(final), scientific(tuning + final)])
    least = min(filter(None, totals), default=0.0)  # an untrained arm has no FLOPs
    rows = [[*row, f"{total / least - 1:+.2%}" if total else ""] for row, total in zip(rows, totals, strict=True)]
    tuned = ["trials", "stopped early", "failed", "FLOPs of tuning"]
    return Table(["arm", *tuned, "final runs", "FLOPs of final runs", "all FLOPs", "more than the least"], rows)


def run_table(findings: Findings) -> Table:
    """Lists each final run with the fingerprint of its config and the command that reproduces it."""
    rows = [
        [run.arm, str(run.seed), f"{run.steps:,}", scientific(run.flops), run.fingerprint, run.command]
        for run in findings.runs
    ]
    return Table(["arm", "seed", "steps", "FLOPs", "fingerprint", "command"], rows)


def _seed_values(outcomes: Outcomes) -> dict[int, float]:
    """Returns the mean over downstream seeds of each pretraining seed."""
    return {seed: float(np.mean([x.value for x in of_seed])) for seed, of_seed in outcomes.items()}


def _mean(outcomes: Outcomes) -> str:
    """Formats the mean over seeds with its 95 % t interval."""
    if not outcomes:
        return "none"
    mean, half_width = mean_interval(list(_seed_values(outcomes).values()))
    decimals = decimals_of(half_width)
    return f"{mean:,.{decimals}f}" + ("" if half_width is None else f" ± {half_width:,.{decimals}f}")
