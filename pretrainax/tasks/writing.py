"""Defines the base class of tasks whose output is a generated text. The model keeps its vocabulary head."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, Optional

import numpy as np

from pretrainax.config import Experiment, UserError, nearest, to_json
from pretrainax.config.choice import resumable_field
from pretrainax.data.batch import Example
from pretrainax.data.objectives import Text
from pretrainax.data.sources.base import Note
from pretrainax.tasks import text_metrics
from pretrainax.tasks.base import Task

_VALIDATION_FIELDS = ("scores", "answers", "num_beams", "max_new_tokens")  # fields that do not affect the corpus


@dataclasses.dataclass
class WritingTask(Task):
    """Base class of tasks that generate a text. A subclass implements `prompt_example` and the methods of `Task`.

    The validation loss covers all records. Generation is slower, because it needs one model step per token. A
    validation during training therefore generates answers for only `answers` records, evenly spaced in the split.
    `python -m pretrainax.evaluate` generates answers for all records.
    """

    # metrics of the generated answers: exact_match | rouge | bleu | chrf
    scores: tuple[str, ...] = resumable_field(("exact_match",))
    answers: Optional[int] = resumable_field(
        0
    )  # number of records for which a validation generates answers; 0: only the loss; None: all records
    num_beams: int = resumable_field(1)  # number of beams of beam search; 1: greedy decoding
    max_new_tokens: Optional[int] = resumable_field(
        None
    )  # maximum number of tokens of a generated answer; None: the room in a row

    has_head: ClassVar[bool] = False
    select_by = "loss"

    def prompt_example(self, text: Text, vocabulary) -> Example:
        """Returns the model inputs of a record up to the beginning of its answer, as an example without targets."""
        raise NotImplementedError

    @property
    def answer_capacity(self) -> int:
        """Returns the number of tokens that are reserved for a generated answer, which is its maximum length."""
        raise NotImplementedError

    @property
    def metric_names(self) -> tuple[str, ...]:
        return () if self.answers == 0 else text_metrics.names(self.scores)

    def validate(self, run, params):
        figures = run.validation.metrics(params)
        if self.answers == 0:
            return figures
        answers, notes = run.write(run, params, self)
        return figures | self.metrics([each.text for each in answers], notes)

    def evaluated(self):
        return dataclasses.replace(self, answers=None)

    def corpus_settings(self):
        return {name: value for name, value in to_json(self).items() if name not in _VALIDATION_FIELDS}

    def metrics(self, answers: Sequence[str], notes: Sequence[Note]) -> dict[str, float]:  # pyright: ignore
        return text_metrics.generation_metrics(answers, [note["answer"] for note in notes], self.scores)

    def check_vocabulary(self, vocabulary, sequence_length):
        if vocabulary.separator is None:
            raise UserError(f"the tokenizer has no end-of-text token, with which {type(self).__name__} ends an answer")

    def field_problems(self) -> Iterator[str]:
        for name in self.scores:
            if name not in text_metrics.SCORES:
                yield f"config.objective.scores has {name!r}, {nearest(name, text_metrics.SCORES)}"
        for field, least in (("answers", 0), ("num_beams", 1), ("max_new_tokens", 1)):
            value = getattr(self, field)
            if value is not None and value < least:
                yield f"config.objective.{field} is {value}, it must be at least {least}"

    def validation_problems(self, experiment: Experiment) -> Iterator[str]:
        metric, generated = experiment.evaluate.select_by, dataclasses.replace(self, answers=None).metric_names
        if self.answers == 0 and metric in generated:
            yield (
                f"config.evaluate.select_by is {metric!r}, which needs generated answers: set "
                "config.objective.answers to their number, for example 200"
            )
            return
        yield from super().validation_problems(experiment)


def decoder_example(row: np.ndarray, weights: np.ndarray) -> Example:
    """Returns the example of a decoder that reads ids and predicts the next ids.

    Args:
      row: [n] ids; the decoder reads the first n - 1 ids and predicts the last n - 1 ids.
      weights: [n] loss weight of each id of `row` as a target; 0: no loss.
    """
    return {
        **decoder_inputs(row[:-1]),
        "targets": row[1:].astype(np.int32),
        "loss_weights": weights[1:].astype(np.float32),
    }


def decoder_inputs(row: np.ndarray) -> Example:
    """Returns the example of a decoder that reads the ids `row`, [n], without targets."""
    positions = np.arange(len(row), dtype=np.int32)
    return {"tokens": row.astype(np.int32), "segment_ids": np.ones(len(row), np.int32), "positions": positions}
