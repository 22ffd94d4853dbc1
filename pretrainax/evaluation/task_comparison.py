"""Compares the task heads of two runs on the same validation records: paired differences of all metrics."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from pretrainax.checkpoints.steps import step_of
from pretrainax.config import Experiment, UserError, config_at_checkpoint
from pretrainax.config.metric import larger_is_better
from pretrainax.config.validation import complete, validate
from pretrainax.inference.load import experiment_of
from pretrainax.interop.origin import Origin, find_origin
from pretrainax.interop.start import load_plain
from pretrainax.runs.task_baselines import Answers, Validated, records_of_rows
from pretrainax.runs.train import open_run
from pretrainax.scoring.results import Result
from pretrainax.tasks import Task
from pretrainax.tasks.baselines import Baseline, Predicted
from pretrainax.training.run import Run
from pretrainax.training.train_step import Params


class Reference(NamedTuple):
    """The outputs of the model of --compare-with for the validation records."""

    name: str  # --compare-with
    description: str
    validated: Validated
    answers: Answers

    def differences(self, run: Run, predicted: Predicted, results: Sequence[Result]) -> list[Result]:
        """Computes the paired differences of a run from this model in the metrics of the whole validation.

        Args:
          predicted: the predictions of the run's validation.
          results: the metrics of the run's validation.

        Raises:
          UserError: the validation records of the two models differ.
        """
        own, own_answers = _validated(run, predicted)
        if own.notes != self.validated.notes or own.records != self.validated.records:
            raise UserError(
                f"--compare-with={self.name}: its {len(self.validated.records):,} validation records and the "
                f"{len(own.records):,} of this run differ in their number, texts, labels or windows: compare runs with "
                "the same config.data.source, config.data.sequence_length and labels"
            )
        differences = []
        for result in results:
            metric = result.measure
            if result.part or metric not in own_answers.metrics or metric not in self.answers.metrics:
                continue
            gain = own.gain(metric, own_answers, self.answers)
            estimate = gain if larger_is_better(metric) else gain.times(-1.0)
            fields = {"measure": f"{metric}_difference", "part": f"difference from {self.description}"}
            differences.append(dataclasses.replace(result, **fields, **estimate._asdict()))
        return differences


def reference_of(name: str, experiment: Experiment) -> Reference:
    """Computes the outputs of another run for its validation records.

    Args:
      name: --compare-with.
      experiment: config of the run to compare with it, whose mesh and number of records the other run gets.

    Raises:
      UserError: `name` is not a run with a head for the same task.
    """
    origin, task = find_origin(name), experiment.validation_objective
    if not origin.steps:
        raise UserError(f"--compare-with={name} is a Hugging Face directory, without a validation split: name a run")
    other = experiment_of(origin)
    if not isinstance(other.objective, Task) or type(other.validation_objective) is not type(task):
        raise UserError(
            f"--compare-with={name} has the objective {type(other.validation_objective).__name__}, and this run has "
            f"{type(task).__name__}: name a run with the same task"
        )
    other.distill, other.mesh, other.objective = None, experiment.mesh, other.objective.evaluated()
    other.evaluate.batches = experiment.evaluate.batches
    other.train.global_batch_size = experiment.train.global_batch_size
    complete(other)
    validate(other)
    with open_run(other) as run:
        run.start.read_frozen(run, origin.directory, is_new=False)
        phase, params = checkpoint_of(run, origin)
        validated, answers = _validated(phase, phase.validation.predict(params))
    return Reference(name, origin.description, validated, answers)


def checkpoint_of(run: Run, origin: Origin) -> tuple[Run, Params]:
    """Returns the phase of a checkpoint, and its parameters.

    Raises:
      UserError: the checkpoints to average have different computations.
    """
    params, steps = load_plain(origin.steps, run.abstract_state.params, origin.folder), list(map(step_of, origin.steps))
    config_at_checkpoint(run.experiment, steps)
    return run.at(max(steps) - 1), params


def _validated(run: Run, predicted: Predicted) -> tuple[Validated, Answers]:
    """Returns the validation records of a run, and the model's outputs for them."""
    (stream,), (_, outputs, notes) = run.validation.valid_batches.streams, predicted
    assert isinstance(stream.objective, Task)
    records = records_of_rows(run, stream.objective, range(len(notes)))
    validated = Validated(stream.objective, notes, records)
    return validated, validated.answers(Baseline("model", outputs))
