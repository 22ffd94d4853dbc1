"""Tests multiple choice: reading records, the choices of a record in a row, truncation, and errors."""

import numpy as np
import pytest

from pretrainax.config import Classify, UserError
from pretrainax.config.validation import validate
from pretrainax.data.objectives import ObjectiveInput
from pretrainax.data.packing import OneEach
from pretrainax.data.sources import JsonLines
from pretrainax.planning.shapes import batch_shapes
from pretrainax.tasks import MultipleChoice
from pretrainax.tokenization import WordPiece
from tests.support import tiny

TOKENIZER = WordPiece(vocab_size=48).build(iter(["it rained so it is wet", "what is dry and what is not wet now"] * 20))
VOCABULARY = TOKENIZER.vocabulary
RECORD = {"context": "it rained", "question": "so", "choices": ["it is wet", "dry"], "answer": "A"}


def adapted(task, variant="bert", length=16):
    experiment = tiny.get_config(variant)
    experiment.data.sequence_length, experiment.objective = length, task
    return task.adapted(experiment).bind(TOKENIZER)


def example_of(task, record):
    (encoded,) = task.encode(task.read(record), TOKENIZER)
    tokens = np.concatenate(encoded.parts)
    ends = np.cumsum([len(ids) for ids in encoded.parts])
    return task.example(ObjectiveInput(tokens, np.ones_like(tokens), ends, note=encoded.note), None, VOCABULARY)


def ids(text):
    return TOKENIZER.encode(text).tolist()


def test_choices_are_segments_of_a_row():
    found = example_of(adapted(MultipleChoice(choices=2)), RECORD)
    sep, passage = VOCABULARY.sep, [VOCABULARY.cls, *ids("it rained"), VOCABULARY.sep]
    texts = [[*passage, *ids(choice), sep] for choice in ("so it is wet", "so dry")]
    assert found["tokens"].tolist() == texts[0] + texts[1]
    assert found["segment_ids"].tolist() == [1] * len(texts[0]) + [2] * len(texts[1])
    assert found["positions"].tolist() == [*range(len(texts[0])), *range(len(texts[1]))]
    of_pair = [[0] * len(passage) + [1] * (len(text) - len(passage)) for text in texts]
    assert found["token_types"].tolist() == of_pair[0] + of_pair[1]
    assert found["labels"] == 0 and found["labels"].dtype == np.int32


@pytest.mark.parametrize("variant", ["bert", "gpt", "t5"])
def test_the_passage_is_cut_and_never_the_choice(variant):
    task = adapted(MultipleChoice(choices=2), variant, length=12)
    found = example_of(task, {**RECORD, "context": "it rained and " * 30, "choices": ["it is wet now", "dry"]})
    for i, choice in enumerate(("so it is wet now", "so dry"), start=1):
        of_choice = found["tokens"][found["segment_ids"] == i].tolist()
        assert len(of_choice) == 12 and str(ids(choice))[1:-1] in str(of_choice)
    if variant == "t5":
        assert found["encoder_segment_ids"].tolist() == [1] * 12 + [2] * 12


def test_of_a_question_that_is_too_long_the_end_is_left():
    task = adapted(MultipleChoice(choices=2), length=8)
    found = example_of(task, {**RECORD, "question": "what is " * 20, "choices": ["it is wet", "dry"]})
    first = found["tokens"][found["segment_ids"] == 1].tolist()
    assert first[:2] == [VOCABULARY.cls, VOCABULARY.sep] and first[-4:] == [*ids("it is wet"), VOCABULARY.sep]


@pytest.mark.parametrize("answer, number", [("B", 1), ("b", 1), (1, 1), (np.int64(0), 0), ("1", 1), ("dry", 1)])
def test_an_answer_is_a_letter_a_number_or_a_text(answer, number):
    assert MultipleChoice(choices=2).read({**RECORD, "answer": answer}).note == {"label": number}


def test_choices_in_fields_of_their_own_and_contexts_of_several_texts():
    task = MultipleChoice(("a", "b"), None, ("choice1", "choice2"), "label", choices=2)
    record = task.read({"a": "one", "b": b"two", "choice1": "x", "choice2": "y", "label": "choice2"})
    assert record.texts == ("one two", "x", "y") and record.note == {"label": 1}
    assert task.fields == ("a", "b", "choice1", "choice2", "label")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"answer": "C"}, "field 'answer' holds 'C', it must be the text of a choice, A to B, or 0 to 1"),
        ({"answer": 2}, "holds 2,"),
        ({"answer": -1}, "holds -1,"),
        ({"answer": True}, "holds True,"),
        ({"answer": None}, "holds None,"),
        ({"choices": ["a", "b", "c"]}, "3 choices, but config.objective.choices is 2"),
        ({"choices": ["a", " "]}, "choice 1 .* is empty"),
        ({"choices": "a or b"}, "field 'choices' holds 'a or b', it must be a list"),
        ({"choices": ["a", 1.5]}, "holds float, it must be a string"),
        ({"context": None}, "field 'context' holds NoneType"),
    ],
)
def test_a_broken_record_says_what_is_wrong_with_it(change, said):
    with pytest.raises(ValueError, match=said):
        MultipleChoice(choices=2).read({**RECORD, **change})


@pytest.mark.parametrize("name", ["context", "question", "choices", "answer"])
def test_a_missing_field_is_named(name):
    record = {key: value for key, value in RECORD.items() if key != name}
    with pytest.raises(ValueError, match=f"no field '{name}'.*config.objective.{name if name != 'choices' else ''}"):
        MultipleChoice(choices=2).read(record)


def config(**task):
    experiment = tiny.get_config("bert")
    experiment.model.masked_lm_head, experiment.evaluate.batches = False, 0
    experiment.objective = MultipleChoice(**task)
    experiment.data.source = JsonLines(path=__file__)
    experiment.objective.complete(experiment)
    return experiment


def test_a_row_has_room_for_all_choices_where_positions_have_it_for_one():
    experiment = config(choices=4)
    experiment.data.sequence_length = 64  # The model has 64 positions.
    validate(experiment)
    assert experiment.model.head == Classify(4, "choice")
    assert batch_shapes(experiment)["tokens"].shape == (8, 256)
    experiment.data.packing = OneEach(buckets=(16, 32))
    validate(experiment)


@pytest.mark.parametrize(
    "task, said",
    [
        (dict(choices=1), "config.objective.choices is 1, it must be from 2 to 26"),
        (dict(choices=3, choice_fields=("a", "b")), "choice_fields is .*a list, or 3 fields"),
        (dict(context_fields=()), "context_fields is .* at least one field"),
    ],
)
def test_fields_that_do_not_fit_are_refused(task, said):
    with pytest.raises(UserError, match=said):
        validate(config(**task))


@pytest.mark.parametrize("head", [Classify(4, "single"), Classify(3, "choice")])
def test_a_head_that_does_not_fit_is_refused(head):
    experiment = config(choices=4)
    experiment.model.head = head
    with pytest.raises(UserError, match=r"MultipleChoice of 4 needs Classify\(num_labels=4, kind='choice'\)"):
        validate(experiment)


def test_accuracy_is_of_records_and_one_place_for_all_is_a_warning():
    task, notes = MultipleChoice(choices=3), [{"label": 2}, {"label": 0}]
    assert task.metrics(np.array([[0.0, 1, 2], [0, 3, 1]]), notes) == {"accuracy": 0.5}
    assert not list(task.warnings(notes))
    assert "CHOICE 2 (from 0) IS RIGHT" in next(task.warnings(notes[:1] * 5))


def test_a_record_without_its_answer_is_asked():
    task = adapted(MultipleChoice(choices=2), length=8)
    asked = task.read_unlabeled({name: value for name, value in RECORD.items() if name != "answer"})
    (encoded,) = task.encode(asked, TOKENIZER)
    assert asked.texts == task.read(RECORD).texts and asked.note == {} and task.is_cut(encoded)
    said = task.prediction(np.array([[0.0, 2.0]]), [{}])
    assert said == {
        "prediction": "B",
        "probabilities": {"A": pytest.approx(0.1192, abs=1e-4), "B": pytest.approx(0.8808, abs=1e-4)},
    }
