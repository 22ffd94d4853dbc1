"""The base of tasks whose answer is a text, which the model writes: it keeps its head over the vocabulary."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, Optional

import numpy as np

from pretrainax.config import Experiment, UserError, nearest, to_json
from pretrainax.config.choice import free
from pretrainax.data.batch import Example
from pretrainax.data.objectives import Text
from pretrainax.data.sources.base import Note
from pretrainax.tasks import text_figures
from pretrainax.tasks.base import Task

_OF_VALIDATION = ("scores", "answers", "num_beams", "max_new_tokens")  # fields that no corpus follows from


@dataclasses.dataclass
class WritingTask(Task):
    """Base of the tasks that end in a text. A subclass gives `asked` beside what a task gives.

    The loss of a validation is of all records. Answers take a step of the model for each token, so they are written of
    as many records as `answers` says, evenly over the split; `python -m pretrainax.evaluate` writes all.
    """

    # figures of the answers that are written: exact_match | rouge | bleu | chrf
    scores: tuple[str, ...] = free(("exact_match",))
    answers: Optional[int] = free(0)  # records whose answers a validation writes; 0: none, the loss alone; None: all
    num_beams: int = free(1)  # of a search for the best answer; 1: always the likeliest token
    max_new_tokens: Optional[int] = free(None)  # of an answer that is written; None: as many as there is room for

    has_head: ClassVar[bool] = False
    select_by = "loss"

    def asked(self, text: Text, vocabulary) -> Example:
        """Returns what the model reads of a record before it writes the answer: an example without predictions."""
        raise NotImplementedError

    @property
    def room_for_answer(self) -> int:
        """Returns how many tokens of an answer are written at most."""
        raise NotImplementedError

    @property
    def figures(self) -> tuple[str, ...]:
        return () if self.answers == 0 else text_figures.names(self.scores)

    def validate(self, run, params):
        figures = run.validation.metrics(params)
        if self.answers == 0:
            return figures
        answers, notes = run.write(run, params, self)
        return figures | self.metrics([each.text for each in answers], notes)

    def evaluated(self):
        return dataclasses.replace(self, answers=None)

    def prepared_by(self):
        return {name: value for name, value in to_json(self).items() if name not in _OF_VALIDATION}

    def metrics(self, answers: Sequence[str], notes: Sequence[Note]) -> dict[str, float]:  # pyright: ignore
        return text_figures.of_texts(answers, [note["answer"] for note in notes], self.scores)

    def check_vocabulary(self, vocabulary, sequence_length):
        if vocabulary.separator is None:
            raise UserError(f"the tokenizer has no end of text, with which {type(self).__name__} ends an answer")

    def field_problems(self) -> Iterator[str]:
        for name in self.scores:
            if name not in text_figures.SCORES:
                yield f"config.objective.scores has {name!r}, {nearest(name, text_figures.SCORES)}"
        for field, least in (("answers", 0), ("num_beams", 1), ("max_new_tokens", 1)):
            value = getattr(self, field)
            if value is not None and value < least:
                yield f"config.objective.{field} is {value}, it must be at least {least}"

    def validation_problems(self, experiment: Experiment) -> Iterator[str]:
        wanted, could = experiment.evaluate.select_by, dataclasses.replace(self, answers=None).figures
        if self.answers == 0 and wanted in could:
            yield (
                f"config.evaluate.select_by is {wanted!r}, for which answers have to be written: set "
                "config.objective.answers to how many, as 200"
            )
            return
        yield from super().validation_problems(experiment)


def predicting(row: np.ndarray, weights: np.ndarray) -> Example:
    """Returns the example of a decoder that reads a row of ids [n] and predicts those of weight 1, float32 [n]."""
    return {
        **reading(row[:-1]),
        "targets": row[1:].astype(np.int32),
        "loss_weights": weights[1:].astype(np.float32),
    }


def reading(row: np.ndarray) -> Example:
    """Returns the example of a decoder that reads a row of ids [n], without predictions."""
    places = np.arange(len(row), dtype=np.int32)
    return {"tokens": row.astype(np.int32), "segment_ids": np.ones(len(row), np.int32), "positions": places}
