"""Implements answer judgment: classifies each answer to a question as correct or wrong; several can be correct."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from pretrainax.data.sources.base import Note
from pretrainax.data.sources.records import value_of
from pretrainax.tasks.base import text_in
from pretrainax.tasks.classification import Classification


@dataclasses.dataclass
class AnswerJudgement(Classification):
    """Classifies an answer to a question about a passage as correct or wrong (MultiRC, Khashabi et al. 2018).

    The record {"paragraph": "It rained.", "question": "How was it?", "answer": "wet", "label": 1, "idx": {"paragraph":
    7, "question": 40, "answer": 2}} becomes the text pair "It rained." and "How was it? wet". Records with the same
    values of `group_fields` are answers to the same question. Several answers to a question can be correct.
    """

    text_field: str = "paragraph"  # the field of the passage
    question_field: str = "question"  # the field of the question, which precedes the answer
    pair_field: str = "answer"  # the field of the answer  # pyright: ignore[reportIncompatibleVariableOverride]
    labels: tuple[str, ...] = ("False", "True")  # the names of the classes "wrong" and "correct", in this order
    group_fields: tuple[str, ...] = ("idx.paragraph", "idx.question")  # the fields that identify the question

    select_by = "f1"
    metric_names = ("accuracy", "f1", "question_accuracy")  # pyright: ignore[reportAssignmentType]

    @property
    def has_single_rows(self) -> bool:
        return False  # the rows of a question belong together

    @property
    def fields(self) -> tuple[str, ...]:
        return (*super().fields, self.question_field, *self.group_fields)

    def read_texts(self, record: Mapping) -> tuple[str, ...]:
        passage, answer = super().read_texts(record)
        return passage, f"{text_in(record, self.question_field, 'question_field')} {answer}"

    def read_label(self, record: Mapping) -> Note:
        group = [str(value_of(record, name, "config.objective.group_fields")) for name in self.group_fields]
        return {**super().read_label(record), "group": group}

    def sample_note(self):
        return {"label": 0, "group": []}

    def metrics(self, answers: np.ndarray, notes: Sequence[Note]) -> dict[str, float]:
        """Computes accuracy and F1 over all records, and the fraction of questions whose judgments are all correct."""
        answers, notes = self.combine_windows(answers, notes)
        scores, is_correct = super().metrics(answers, notes), collections.defaultdict(list)
        for logits, note in zip(answers, notes, strict=True):
            is_correct[tuple(note["group"])].append(logits.argmax() == note["label"])
        question_accuracy = float(np.mean([all(judgments) for judgments in is_correct.values()]))
        return {"accuracy": scores["accuracy"], "f1": scores["f1"], "question_accuracy": question_accuracy}

    def field_problems(self):
        yield from super().field_problems()
        if len(self.labels) != 2 or self.multi_label:
            yield f"config.objective.labels is {self.labels}, it must name two classes, wrong and right"
