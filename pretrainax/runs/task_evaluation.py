"""Scores the model on the tasks of `config.evaluate.tasks` at each validation of a run."""

import time
from typing import Optional

import jax

from pretrainax.checkpoints.params import Params
from pretrainax.config import Experiment, UserError
from pretrainax.config.metric import FRACTION, STANDARD_ERRORS, Metric, declare, reported
from pretrainax.files.errors import counted
from pretrainax.inference.loaded import LoadedModel
from pretrainax.runs.current_model import current_model, keep_compiled
from pretrainax.scoring.tasks.run import LoadedTask, load_tasks, run_tasks
from pretrainax.training.callbacks import Callback
from pretrainax.training.run import Run

declare(
    Metric("accuracy_per_byte", "share of questions with the right choice by log p per byte", True, unit=FRACTION),
    Metric(
        "accuracy_unconditional",
        "share of questions with the right choice by log p(choice | prompt) - log p(choice)",
        True,
        unit=FRACTION,
    ),
    Metric("majority_accuracy", "share of examples with the most frequent label", True, unit=FRACTION),
    Metric("answered", "share of prompts from whose continuation an answer is read", True, unit=FRACTION),
    depends_on=("text",),
)


class TaskEvaluation(Callback):
    """Adds "accuracy/task=NAME" and other metrics of tasks, with standard errors, to each validation.

    The scores equal the scores of `pretrainax.evaluate --tasks` for the validated parameters. Scoring reads the
    parameters between two steps and uses no random numbers of the run, so it does not change the training.
    """

    part = label = "tasks"

    def __init__(self):
        self._tasks: list[LoadedTask] = []
        self._previous: Optional[LoadedModel] = None

    def resolve_fields(self, experiment: Experiment) -> None:
        """Reads the tasks.

        Raises:
          UserError: a task or an example is invalid, the model has a task head, or the run has several processes.
        """
        tasks = experiment.evaluate.tasks
        if jax.process_count() > 1:
            raise UserError(
                f"config.evaluate.tasks is {tasks}, but a run of several processes cannot score tasks: set it to (), "
                "and score its checkpoints with python -m pretrainax.evaluate --tasks --every-checkpoint"
            )
        if experiment.model.head is not None:
            raise UserError(
                f"config.evaluate.tasks is {tasks}, but a model with a task head predicts no text: set it to ()"
            )
        self._tasks = load_tasks(tasks)

    def rows(self, run):
        most = run.experiment.evaluate.task_examples
        for name, _, asked in self._tasks:
            count = min(len(asked), most or len(asked))
            yield f"task {name}", f"{count:,} of {counted(len(asked), 'example')} at each validation"

    def on_start(self, loop, state, metrics):
        loaded = self._loaded(loop.run, loop.run.validated(state))
        for task in self._tasks:
            task.task.how(loaded)  # raises UserError before the first step if the model does not support the task

    def evaluation_metrics(self, loop, state):
        started, metrics, errors, shown = time.perf_counter(), {}, {}, []
        loaded = self._loaded(loop.run, loop.run.validated(state))
        for results in run_tasks(loaded, self._tasks, loop.run.experiment.evaluate.task_examples or None):
            for result in results:
                name = "/".join(filter(None, (result.measure, f"task={result.source}", result.part)))
                metrics[name] = result.value
                if result.standard_error is not None:
                    errors[name] = result.standard_error
            shown.append(f"{results[0].source} {results[0].measure} {reported(results[0].measure, results[0].value)}")
        loaded.clear_cache()
        loop.note(f"tasks: {' · '.join(shown)} in {time.perf_counter() - started:.1f} s")
        return metrics | ({STANDARD_ERRORS: errors} if errors else {})

    def _loaded(self, run: Run, params: Params) -> LoadedModel:
        """Returns the current model, with the compiled programs of earlier validations."""
        loaded = current_model(run, params)
        self._previous = keep_compiled(loaded, self._previous)
        return loaded
