"""Tests windows of text that is longer than a row: they lose nothing, and count as one record in metrics."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import UserError
from pretrainax.config.validation import validate
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources import JsonLines
from pretrainax.tasks import Chunks, Classification, Regression
from pretrainax.tasks.chunks import TRUNCATED, WINDOW, sigmoid, softmax
from pretrainax.tokenization import WordPiece
from tests.support import tiny

TOKENIZER = WordPiece(vocab_size=40).build(iter(["a fine film and a dull one", "no film at all is fine"] * 20))


def windows(chunks, *sizes, room=126):
    parts = [np.arange(size, dtype=np.int32) for size in sizes]
    return list(chunks.windows(Encoded(parts, {"label": 1}), room))


def test_the_worked_example():
    found = windows(Chunks(stride=64), 250)
    assert [(w.parts[0][0], w.parts[0][-1]) for w in found] == [(0, 125), (64, 189), (124, 249)]
    assert [w.note for w in found] == [{"label": 1, WINDOW: i} for i in range(3)]


@given(st.integers(0, 400), st.integers(1, 40), st.integers(1, 40))
def test_every_token_is_in_a_window_and_none_is_longer_than_the_row(size, room, stride):
    found = windows(Chunks(stride=min(stride, room)), size, room=room)
    assert all(len(w.parts[0]) <= room for w in found) and not any(TRUNCATED in w.note for w in found)
    assert sorted(set(np.concatenate([w.parts[0] for w in found]).tolist())) == list(range(size))


def test_of_a_pair_the_longer_text_is_in_windows_beside_the_other():
    found = windows(Chunks(), 20, 250)
    assert all(w.parts[0].tolist() == list(range(20)) and len(w.parts[1]) == 106 for w in found)
    assert found[1].parts[1][0] == 53 and found[-1].parts[1][-1] == 249
    first = windows(Chunks(), 250, 100)  # The other text has half of the row.
    assert all(len(w.parts[0]) == 63 and len(w.parts[1]) == 63 for w in first)
    assert [TRUNCATED in w.note for w in first] == [True] + [False] * (len(first) - 1)


def test_windows_beyond_the_most_are_left_out_and_noted_in_the_first():
    found = windows(Chunks(stride=50, max_windows=2), 1000)
    assert [w.note for w in found] == [{"label": 1, WINDOW: 0, TRUNCATED: True}, {"label": 1, WINDOW: 1}]


def test_a_stride_that_leaves_out_tokens_is_refused():
    with pytest.raises(UserError, match="stride is 127, but a window has 126 tokens: the model would not"):
        windows(Chunks(stride=127), 250)


# Three windows of one record, and one window of another record.
ANSWERS = np.array([[1.0, 0.0], [0.0, 3.0], [2.0, 0.0], [5.0, 1.0]], np.float32)
NOTES = [{"label": 1, WINDOW: 0}, {"label": 1, WINDOW: 1}, {"label": 1, WINDOW: 2}, {"label": 0, WINDOW: 0}]


@pytest.mark.parametrize("kind", ["single", "multi", "regression"])
def test_the_answers_to_the_windows_of_a_record_are_joined(kind):
    def joined(join):
        answers, notes = Chunks(join=join).combine(ANSWERS, NOTES, kind)
        assert notes == [NOTES[0], NOTES[3]]
        return answers

    np.testing.assert_allclose(joined("mean"), [[1, 1], [5, 1]])
    np.testing.assert_allclose(joined("max"), [[2, 3], [5, 1]])
    np.testing.assert_allclose(joined("first"), [[1, 0], [5, 1]])
    if kind == "regression":
        np.testing.assert_allclose(joined("probabilities"), joined("mean"))
    else:
        of_labels = softmax if kind == "single" else sigmoid
        expected = [of_labels(ANSWERS[:3]).mean(0), of_labels(ANSWERS[3:])[0]]
        np.testing.assert_allclose(of_labels(joined("probabilities")), expected, rtol=1e-6)


def test_a_record_counts_once_in_figures_and_is_said_once():
    task = Classification(labels=("a", "b"), chunks=Chunks(join="max"))
    assert task.metrics(ANSWERS, NOTES)["accuracy"] == 1.0
    assert dataclasses.replace(task, chunks=None).metrics(ANSWERS, NOTES)["accuracy"] == 0.5
    said = task.prediction(ANSWERS[:3], NOTES[:3])
    assert said["prediction"] == "b" and said["probabilities"]["b"] == pytest.approx(1 / (1 + np.exp(-1)), abs=1e-6)
    numbers = Regression(chunks=Chunks())
    notes = [{**note, "score": 1.0} for note in NOTES]
    assert numbers.metrics(ANSWERS[:, :1], notes)["squared_error"] == 8.0
    assert numbers.prediction(ANSWERS[:3, :1], notes[:3]) == {"prediction": 1.0}


@pytest.mark.parametrize("variant", ["bert", "gpt", "t5"])
def test_rows_of_windows_are_full_and_the_corpus_is_another_one(variant):
    experiment = tiny.get_config(variant)
    task = Classification(labels=("a", "b"), chunks=Chunks())
    experiment.data.sequence_length = 12
    adapted = task.adapted(experiment)
    encoded = list(adapted.encode(task.read({"text": "a fine film " * 20, "label": 0}), TOKENIZER))
    bound = adapted.bind(TOKENIZER)
    assert len(encoded) > 5 and {len(e.parts[0]) for e in encoded} == {bound.text_capacity(1)}
    assert not any(bound.is_cut(e) for e in encoded)
    experiment.data.sequence_length = 16
    keys = [adapted.corpus_settings(), task.adapted(experiment).corpus_settings()]
    assert keys[0] != keys[1] != Classification(labels=("a", "b")).adapted(experiment).corpus_settings()


@pytest.mark.parametrize(
    "chunks, said",
    [
        (Chunks(stride=0), "config.objective.chunks.stride is 0, it must be at least 1"),
        (Chunks(max_windows=0), "config.objective.chunks.max_windows is 0"),
        (Chunks(join="median"), "config.objective.chunks.join is 'median'"),
        (Chunks(), "config.data.drop_duplicates compares whole documents"),
    ],
)
def test_what_cannot_work_is_one_line(chunks, said):
    experiment = tiny.get_config("bert")
    experiment.model.masked_lm_head = False
    experiment.objective, experiment.data.source = Classification(labels=("a", "b"), chunks=chunks), JsonLines(__file__)
    experiment.data.drop_duplicates = True
    experiment.objective.complete(experiment)
    with pytest.raises(UserError, match=said):
        validate(experiment)
