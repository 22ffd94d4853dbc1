"""Tests that the metrics judge each answer separately, and each question by all of its answers."""

import numpy as np
import pytest

from pretrainax.tasks import AnswerJudgement

RECORD = {"paragraph": "It rained.", "question": "How was it?", "answer": "wet", "label": 1}


def test_a_question_is_right_where_each_of_its_answers_is():
    notes = [{"label": label, "group": group} for label, group in zip([1, 0, 1, 1], ["a", "b", "a", "b"], strict=True)]
    said = np.array([[0.0, 1], [0, 1], [0, 1], [0, 1]])  # All are judged right; one answer of "b" is wrong.
    found = AnswerJudgement().metrics(said, notes)
    assert found == pytest.approx({"accuracy": 0.75, "f1": 6 / 7, "question_accuracy": 0.5})
    assert tuple(found) == AnswerJudgement().metric_names


def test_a_record_without_what_tells_its_question_is_refused():
    with pytest.raises(ValueError, match="no field 'idx.paragraph'.*config.objective.group_fields"):
        AnswerJudgement().read(RECORD)
    assert AnswerJudgement(group_fields=("question",)).read(RECORD).note == {"label": 1, "group": ["How was it?"]}


def test_it_is_asked_without_label_and_question_number():
    assert AnswerJudgement().read_unlabeled(RECORD).texts == ("It rained.", "How was it? wet")


def test_there_are_two_classes():
    (said,) = AnswerJudgement(labels=("a", "b", "c")).field_problems()
    assert "labels is ('a', 'b', 'c'), it must name two classes" in said
