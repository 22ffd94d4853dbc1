"""Tests BidirectionalLM: the targets are the next and the previous tokens, and a mask can separate documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.data.objectives import BidirectionalLM, Lengths, ObjectiveInput
from pretrainax.tokenization.base import Vocabulary

VOCABULARY = Vocabulary(size=50, bos=1, eos=1)
TOKENS = np.array([5, 6, 1, 7], np.int32)  # the cat . a
SEGMENTS = np.array([1, 1, 1, 2], np.int32)


def example(objective, tokens=TOKENS, segment_ids=SEGMENTS):
    return objective.example(ObjectiveInput(tokens, segment_ids), np.random.default_rng(0), VOCABULARY)


def test_a_row_takes_as_many_tokens_as_it_is_long():
    assert BidirectionalLM().lengths(7) == Lengths(raw=7, inputs=7, targets=7)


@pytest.mark.parametrize(
    "mask_documents, forward, backward, segments, positions",
    [
        (False, [1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 2, 3]),
        (True, [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 2], [0, 1, 2, 0]),
    ],
)
def test_the_worked_example(mask_documents, forward, backward, segments, positions):
    found = example(BidirectionalLM(mask_documents))
    expected = {
        "tokens": TOKENS,
        "targets": [6, 1, 7, 5],
        "loss_weights": forward,
        "previous": [7, 5, 6, 1],
        "previous_weights": backward,
        "segment_ids": segments,
        "positions": positions,
    }
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert found[name].dtype == (np.float32 if name.endswith("weights") else np.int32)


@given(st.lists(st.integers(0, 49), min_size=2, max_size=40), st.booleans())
def test_the_text_can_be_restored(ids, mask_documents):
    tokens, objective = np.array(ids, np.int32), BidirectionalLM(mask_documents)
    row = example(objective, tokens, np.arange(len(ids), dtype=np.int32) // 3)
    np.testing.assert_array_equal(objective.restore(row, VOCABULARY), tokens)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=10))
def test_both_directions_predict_every_token_but_the_first_of_a_document_or_the_last(lengths):
    segments = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    row = example(BidirectionalLM(mask_documents=True), segments, segments)
    for name in ("loss_weights", "previous_weights"):
        assert row[name].sum() == sum(lengths) - len(lengths)
    np.testing.assert_array_equal(row["targets"][row["loss_weights"] > 0], segments[row["loss_weights"] > 0])


def test_statistics_tell_what_each_direction_predicts():
    found = {s.name: s.measured for s in BidirectionalLM().statistics([example(BidirectionalLM())], VOCABULARY)}
    assert found == {"loss tokens": 3 / 4, "ends of documents in an example": 1.0, "backward loss tokens": 3 / 4}
