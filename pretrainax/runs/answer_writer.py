"""Generates a task's text outputs for records of the validation split during training."""

from collections.abc import Sequence
from typing import Optional

import jax

from pretrainax.adapt.tuning import has_plain_model
from pretrainax.checkpoints.params import Params
from pretrainax.config import Experiment, UserError
from pretrainax.data.objectives import Objective
from pretrainax.data.sources.base import Note
from pretrainax.inference.decoding import Generated, generate_examples
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.request import Sampling
from pretrainax.runs.current_model import current_model, keep_compiled
from pretrainax.tasks import WritingTask
from pretrainax.training.callbacks import Callback
from pretrainax.training.run import Run


class AnswerWriter(Callback):
    """Generates answers (a task's text outputs) during validation; implements `training.run.GenerateOutputs`.

    All of a run's validations share one instance, and therefore its compiled programs.
    """

    part = "starting"

    def __init__(self):
        self._previous: Optional[LoadedModel] = None

    def resolve_fields(self, experiment: Experiment) -> None:
        check_answers(experiment)

    def __call__(self, run: Run, params: Params, task: Objective) -> tuple[Sequence[Generated], list[Note]]:
        """Generates answers for `task.answers` validation records; returns the answers and the records' metadata.

        The records are evenly spaced in the validation split. If `task.answers` is None, all records are used.
        """
        assert isinstance(task, WritingTask)
        batches = run.validation.valid_batches
        (stream,) = batches.streams
        stream_task, rows = stream.objective, batches.rows_per_epoch
        assert isinstance(stream_task, WritingTask)
        count = rows if task.answers is None else min(task.answers, rows)
        record_indices = [i * rows // count for i in range(count)]
        stream.prefetch(record_indices)
        prompts = [stream_task.prompt_example(stream.record(n), stream.vocabulary) for n in record_indices]
        loaded = current_model(run, params)
        self._previous = keep_compiled(loaded, self._previous)
        capacity, stop = stream_task.answer_capacity, stream_task.stop
        sampling = Sampling(max_new_tokens=capacity, num_beams=task.num_beams, stop=stop)
        answers = generate_examples(loaded, prompts, sampling)
        loaded.clear_cache()
        return answers, [stream.note(n) for n in record_indices]


def check_answers(experiment: Experiment) -> None:
    """Raises UserError if the config requests generated answers during validation but the run cannot generate them."""
    task = experiment.validation_objective
    if not isinstance(task, WritingTask) or task.answers == 0:
        return
    if jax.process_count() > 1:
        raise UserError(
            f"config.objective.answers is {task.answers}, but a run of several processes cannot generate answers: set "
            "it to 0, and generate them with python -m pretrainax.evaluate in one process"
        )
    if not has_plain_model(experiment):
        raise UserError(
            f"config.objective.answers is {task.answers}, but a model with {experiment.tuning} generates no text: "
            "set it to 0, or use LoRA"
        )
