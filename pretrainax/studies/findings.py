"""Collects the results of a study from its workdir, in an order that does not depend on the order of the runs."""

import glob
import os
from collections.abc import Iterator

from pretrainax.config.metric import declared, larger_is_better
from pretrainax.files.json_files import JsonObject
from pretrainax.studies.jobs import FINAL, RUN, Job, Results, experiment_of
from pretrainax.studies.outcomes import FinalRun, Findings, Outcome, Outcomes, Trial
from pretrainax.studies.perform import context_of, lines_of, signed
from pretrainax.studies.study import Measure, Study
from pretrainax.studies.tuning import Search


def findings_of(results: Results, seeds: range) -> Findings:
    """Collects the findings of finished trials and final runs; reads the values of measures that the worker saved.

    Args:
      seeds: seeds of the final runs.
    """
    plan, workdir, state = results.plan, results.workdir, results.search()
    changes = list(plan.changes)
    arms = [arm.name for arm in plan.study.arms]
    runs, finished = [], list[Job]()
    for arm in arms:
        changes += _changes(results, state, arm)
        for seed in seeds:
            job = results.final(arm, seed, "train", state.chosen)
            if (result := results.of(job)) is None:
                continue
            if result["failed"]:
                changes.append(f"{job.folder} failed: {result['failed']}")
                continue
            measured = results.of(job._replace(step="measure"))
            if measured and measured["failed"]:
                changes.append(f"the measures of {job.folder} failed: {measured['failed']}")
            elif measured:
                finished.append(job)
            runs.append(_final_run(job, result, workdir))
    return Findings(
        trials=list(_trials(results, state)),
        chosen=state.chosen,
        unfinished=state.unfinished,
        runs=runs,
        outcomes={measure.name: _outcomes(results, measure, finished, arms) for measure in plan.study.measures},
        baselines={measure.name: _baselines(results, measure, finished) for measure in plan.study.measures},
        changes=changes,
        choices={measure.name: _choices(results, measure, state) for measure in plan.study.measures if measure.chooses},
    )


def _changes(results: Results, state: Search, arm: str) -> Iterator[str]:
    """Yields a line if no settings of an arm could be chosen, and a line for each folder of unused final runs."""
    chooser = results.chooser(arm, state.chosen)
    choice = chooser and results.of(chooser)
    if choice and choice["failed"]:
        yield f"the settings of the measures of {arm} were not chosen: {choice['failed']}"
    used = os.path.dirname(results.final(arm, results.plan.study.final.seed, "train", state.chosen).folder)
    for path in sorted(glob.glob(os.path.join(glob.escape(results.workdir), FINAL, arm, "*"))):
        folder = os.path.relpath(path, results.workdir)
        if folder != used and not state.pending:
            yield f"an addition to the study changed the best values of {arm}: the runs in {folder} are not used"


def without_times(findings: Findings, study: Study) -> Findings:
    """Removes the measures of time that no verdict uses, so that the findings do not depend on the machine."""
    kept = [measure.name for measure in study.measures if measure.name not in study.untested_times]
    outcomes, baselines = ({name: x[name] for name in kept} for x in (findings.outcomes, findings.baselines))
    return findings._replace(outcomes=outcomes, baselines=baselines)


def _trials(results: Results, state: Search) -> Iterator[Trial]:
    """Yields all trials by arm, in the order of the search; a stopped trial has the value of its first part."""
    study = results.plan.study
    by_name = {measure.name: measure.larger_is_better for measure in study.measures}
    for request, is_stopped in state.requested.items():
        job = results.trial(request._replace(is_part=is_stopped))
        if (result := results.of(job)) is None:
            continue
        assert study.tuning is not None
        is_larger = by_name.get(study.tuning.measure)
        if is_stopped or is_larger is None:
            is_larger = larger_is_better(experiment_of(results.plan, job).select_by)
        value = None if result["cost"] is None else signed(is_larger, result["cost"])
        yield Trial(job.arm, job.values, job.seed, value, result["flops"], is_stopped)


def _final_run(job: Job, result: JsonObject, workdir: str) -> FinalRun:
    folder = os.path.join(job.folder, RUN)
    lines = [_without_times(line) for line in lines_of(os.path.join(workdir, folder))]
    arm, seed, steps, flops = job.arm, job.seed, result["steps"], result["flops"]
    return FinalRun(arm, seed, folder, result["fingerprint"], result["command"], steps, flops, lines)


def _without_times(line: JsonObject) -> JsonObject:
    """Removes the metrics that depend on the machine and its load from a line of metrics.jsonl."""
    return {name: value for name, value in line.items() if "hardware" not in declared(name).depends_on}


def _outcomes(results: Results, measure: Measure, finished: list[Job], arms: list[str]) -> dict[str, Outcomes]:
    """Returns {arm: {seed: outcomes}} of a measure."""
    found: dict[str, dict[int, list[Outcome]]] = {arm: {} for arm in arms}
    for job in finished:
        choice = results.choices(job).get(measure.name, {})
        folder = os.path.join(results.workdir, job.folder, RUN)
        context = context_of(results.plan.study, choice, job.seed)
        found[job.arm][job.seed] = measure.outcomes(folder, experiment_of(results.plan, job), context)
    return dict(found)


def _choices(results: Results, measure: Measure, state: Search) -> dict[str, JsonObject]:
    """Returns {arm: result of `Measure.choose`} for the arms that have this result."""
    study = results.plan.study
    jobs = {arm.name: results.final(arm.name, study.final.seed, "choose", state.chosen) for arm in study.arms}
    return {arm: choice for arm, job in jobs.items() if (choice := results.choices(job).get(measure.name))}


def _baselines(results: Results, measure: Measure, finished: list[Job]) -> dict[str, Outcome]:
    """Returns the baselines of a measure, which the worker saved with the first run."""
    if not finished:
        return {}
    folder, experiment = (
        os.path.join(results.workdir, finished[0].folder, RUN),
        experiment_of(results.plan, finished[0]),
    )
    choice = results.choices(finished[0]).get(measure.name, {})
    return measure.baselines(folder, experiment, context_of(results.plan.study, choice, finished[0].seed))
