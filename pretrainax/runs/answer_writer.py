"""Writes the answers of a task to records of the validation split, while the model is in training."""

import dataclasses
from collections.abc import Sequence
from typing import Optional, cast

import jax

from pretrainax.adapt import Tuning
from pretrainax.checkpoints.params import Params
from pretrainax.config import Experiment, UserError
from pretrainax.data.objectives import Objective
from pretrainax.data.sources.base import Note
from pretrainax.inference.decoding import Generated, write
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.request import Sampling
from pretrainax.tasks import WritingTask
from pretrainax.training.callbacks import Callback
from pretrainax.training.run import Run
from pretrainax.training.wrapped import plain


class AnswerWriter(Callback):
    """Writes answers: `training.run.Write`. What is compiled serves all validations of a run."""

    part = "starting"

    def __init__(self):
        self._writer: Optional[LoadedModel] = None

    def settle(self, experiment: Experiment) -> None:
        check_answers(experiment)

    def __call__(self, run: Run, params: Params, task: Objective) -> tuple[Sequence[Generated], list[Note]]:
        """Returns what the model writes for as many records of the validation split as `task.answers` says, evenly
        over it, with their notes."""
        assert isinstance(task, WritingTask)
        batches = run.validation.valid_batches
        (stream,) = batches.streams
        bound, rows = stream.objective, batches.rows_per_epoch
        assert isinstance(bound, WritingTask)
        count = rows if task.answers is None else min(task.answers, rows)
        numbers = [i * rows // count for i in range(count)]
        stream.hold(numbers)
        prompts = [bound.asked(stream.record(n), stream.vocabulary) for n in numbers]
        if self._writer is None:
            model, tokenizer = plain(run.model), run.prepared.tokenizer
            self._writer = LoadedModel(run.experiment, model, None, tokenizer, run.mesh, "this run")
        loaded = dataclasses.replace(self._writer, params=run.plain(params)[1]).compiled_as(self._writer)
        sampling = Sampling(max_new_tokens=bound.room_for_answer, num_beams=task.num_beams)
        said = write(loaded, prompts, sampling)
        loaded.forget()
        return said, [stream.note(n) for n in numbers]


def check_answers(experiment: Experiment) -> None:
    """Raises UserError where a validation is to write answers and cannot."""
    asked, tuning = experiment.validation_objective, experiment.tuning
    if not isinstance(asked, WritingTask) or asked.answers == 0:
        return
    if jax.process_count() > 1:
        raise UserError(
            f"config.objective.answers is {asked.answers}, and one process writes answers: set it to 0, and let "
            "python -m pretrainax.evaluate write them in a process by itself"
        )
    if tuning is not None and not cast(Tuning, tuning).is_mergeable:
        raise UserError(
            f"config.objective.answers is {asked.answers}, and a model with {tuning} writes no text: set it to 0, or "
            "tune by LoRA"
        )
