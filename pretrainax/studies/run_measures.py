"""Computes the measures that need only a run: a metric of the run's validation, and the run's speed."""

import operator
import os
from collections.abc import Iterator, Mapping

import numpy as np

from pretrainax.config import Experiment, UserError, nearest
from pretrainax.config.metric import METRICS
from pretrainax.evaluation.task_comparison import checkpoint_of
from pretrainax.inference.load import experiment_of
from pretrainax.interop.origin import find_origin
from pretrainax.reporting.run_lines import with_seconds
from pretrainax.runs.comparison import baseline_of, validation_sums
from pretrainax.runs.train import open_run
from pretrainax.scoring.results import leave_one_out
from pretrainax.studies.measures import ValidationLoss
from pretrainax.studies.outcomes import MeasureContext, Outcome
from pretrainax.studies.saved_outcomes import is_chosen, is_saved, saved_outcomes
from pretrainax.training.metrics import read_metrics

# The fields that determine the loss and its records.
_SHARED = ("validation_objective", "tokenizer", "data.source", "data.sequence_length", "data.packing")


def problems(measure: ValidationLoss, experiment: Experiment) -> Iterator[str]:
    """Yields one line for each reason why a run cannot have the measure."""
    name = measure.name
    if measure.metric not in METRICS:
        yield f"the measure {name}: metric is {measure.metric!r}, {nearest(measure.metric, METRICS)}"
    if experiment.validation_objective.unit == "records":
        yield f"config.objective is {type(experiment.validation_objective).__name__}, a task: use the measure TaskScore"


def differences(measure: ValidationLoss, experiments: Mapping[str, Experiment]) -> Iterator[str]:
    """Yields one line for each setting that makes the losses of two arms incomparable."""
    (first, reference), *others = experiments.items()
    for name, experiment in others:
        found = {f"config.{field}": map(operator.attrgetter(field), (reference, experiment)) for field in _SHARED}
        found["config.evaluate.batches × config.train.global_batch_size"] = map(_rows, (reference, experiment))
        for field, (one, other) in found.items():
            if one != other:
                yield (
                    f"the {measure.metric} of the arms {first} and {name} is not comparable, because {field} is {one} "
                    f"and {other}"
                )


def _rows(experiment: Experiment) -> int:
    """Returns the number of rows of a validation; 0: all rows."""
    return experiment.evaluate.batches * experiment.train.global_batch_size


def outcomes(measure: ValidationLoss, folder: str, experiment: Experiment, context: MeasureContext) -> list[Outcome]:
    """Computes the metric of a run; all downstream seeds have the same outcome, because nothing is random."""
    has_baseline = is_saved(folder, measure, "baselines", {"is_tuning": context.is_tuning})
    return [_found(measure, folder, context, has_baseline)["model"]] * len(context.downstream_seeds)


def baselines(
    measure: ValidationLoss, folder: str, experiment: Experiment, context: MeasureContext
) -> dict[str, Outcome]:
    """Computes the metric of a model that uses only the frequencies of the training tokens and the form of targets."""
    found = _found(measure, folder, context, True)
    return {name: outcome for name, outcome in found.items() if name != "model"}


def _found(measure: ValidationLoss, folder: str, context: MeasureContext, has_baseline: bool) -> dict[str, Outcome]:
    """Computes the metric of the model and, if `has_baseline`, of the baseline; opens the run only once."""
    settings, what = {"is_tuning": context.is_tuning}, "baselines" if has_baseline else "outcomes"
    return saved_outcomes(folder, measure, what, settings, lambda _: _compute(measure, folder, context, has_baseline))


def _compute(measure: ValidationLoss, folder: str, context: MeasureContext, has_baseline: bool) -> dict[str, Outcome]:
    origin = find_origin(folder)
    experiment = experiment_of(origin)
    experiment.distill = None  # a student is validated without its teacher
    with open_run(experiment) as run:
        run.start.read_frozen(run, folder, is_new=False)
        phase, params = checkpoint_of(run, origin)
        sums = validation_sums(phase, params, baseline_of(run) if has_baseline else None).metrics
    if measure.metric not in sums:
        raise UserError(f"{folder}: the validation has no {measure.metric}, {nearest(measure.metric, sums)}")
    model, baseline, weights = sums[measure.metric]
    records = np.flatnonzero(is_chosen(np.arange(len(weights)), context.is_tuning))
    if np.count_nonzero(weights[records]) < 2:
        raise UserError(f"{folder}: its validation has too few documents and rows: raise config.evaluate.batches")
    found = {"model": model} | ({} if baseline is None else {"token frequencies": baseline})
    values = {name: leave_one_out(x[records], weights[records]) for name, x in found.items()}
    return {name: Outcome(value, changes) for name, (value, changes, _) in values.items()}


def tokens_per_second(folder: str) -> float:
    """Computes the tokens of text per second of all steps that compiled no program.

    Raises:
      UserError: metrics.jsonl has no timed step.
    """
    lines = [x for x in with_seconds(read_metrics(os.path.join(folder, "metrics.jsonl"))) if x["split"] == "train"]
    seconds = np.diff([0.0, *(x["seconds"] or 0.0 for x in lines)])
    speeds = np.array([x["tokens_per_second"] or 0.0 for x in lines])
    if not seconds.sum() > 0:
        raise UserError(f"{folder}: each step compiled a program: train more steps, or lower config.train.log_every")
    return float((seconds * speeds).sum() / seconds.sum())
