"""Tests CausalLM: the targets are the next tokens, and a mask can separate documents."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import DataConfig, Experiment, LearnedPositions, ModelConfig
from pretrainax.data.objectives import CausalLM, Lengths, ObjectiveInput, SpanCorruption
from pretrainax.data.objectives.causal import positions_from_segments
from pretrainax.tokenization.base import Vocabulary
from tests.data.conftest import TEXTS

VOCABULARY = Vocabulary(size=50, bos=1, eos=1)
TOKENS = np.array([5, 6, 1, 7, 8, 9, 1, 4], np.int32)
SEGMENTS = np.array([1, 1, 1, 2, 2, 2, 2, 3], np.int32)


def example(objective, tokens=TOKENS, segment_ids=SEGMENTS):
    return objective.example(ObjectiveInput(tokens, segment_ids), np.random.default_rng(0), VOCABULARY)


def experiment(family="decoder", objective=None, length=64, max_length=64):
    model = ModelConfig(family=family, position=LearnedPositions(max_length))
    return Experiment(model, None, DataConfig(None, length), objective or CausalLM(), None, None)


def test_a_row_takes_one_token_more_than_it_is_long():
    assert CausalLM().lengths(7) == Lengths(raw=8, inputs=7, targets=7)


def test_targets_are_the_next_tokens():
    row = example(CausalLM())
    np.testing.assert_array_equal(row["tokens"], [5, 6, 1, 7, 8, 9, 1])
    np.testing.assert_array_equal(row["targets"], [6, 1, 7, 8, 9, 1, 4])


def test_documents_together_are_one_segment():
    row = example(CausalLM())
    np.testing.assert_array_equal(row["segment_ids"], np.ones(7))
    np.testing.assert_array_equal(row["positions"], np.arange(7))
    np.testing.assert_array_equal(row["loss_weights"], np.ones(7))


def test_documents_apart_have_their_own_segments_and_positions():
    row = example(CausalLM(mask_documents=True))
    np.testing.assert_array_equal(row["segment_ids"], [1, 1, 1, 2, 2, 2, 2])
    np.testing.assert_array_equal(row["positions"], [0, 1, 2, 0, 1, 2, 3])


def test_documents_apart_predict_nothing_of_each_other():
    row = example(CausalLM(mask_documents=True))
    np.testing.assert_array_equal(row["loss_weights"], [1, 1, 0, 1, 1, 1, 0])  # 7 and 4 begin documents.


@pytest.mark.parametrize("mask_documents", [False, True])
def test_dtypes(mask_documents):
    dtypes = {name: str(array.dtype) for name, array in example(CausalLM(mask_documents)).items()}
    assert dtypes.pop("loss_weights") == "float32"
    assert set(dtypes.values()) == {"int32"}


def test_a_single_token_has_no_target():
    assert CausalLM().measure(1) == Lengths(raw=1, inputs=0, targets=0)


def test_statistics_tell_what_is_predicted_and_how_many_documents_there_are():
    rows = [example(CausalLM(mask_documents=True)), example(CausalLM())]
    found = {s.name: s.measured for s in CausalLM().statistics(rows, VOCABULARY)}
    assert found == {"loss tokens": 12 / 14, "ends of documents in an example": 2.0}


@pytest.mark.parametrize("kind", ["WordPiece", "ByteBPE", "Unigram", "Characters"])
def test_the_texts_of_every_tokenizer_can_be_restored(kind, tokenizers_of_all_kinds):
    tokenizer = tokenizers_of_all_kinds[kind]
    for ids in tokenizer.encode_batch(TEXTS):
        np.testing.assert_array_equal(CausalLM().restore(example(CausalLM(), ids, np.ones_like(ids)), VOCABULARY), ids)


@given(st.lists(st.integers(0, 49), min_size=2, max_size=40), st.booleans())
def test_the_text_can_be_restored(ids, mask_documents):
    tokens, objective = np.array(ids, np.int32), CausalLM(mask_documents)
    row = example(objective, tokens, np.ones(len(ids), np.int32))
    np.testing.assert_array_equal(objective.restore(row, VOCABULARY), tokens)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=10))
def test_positions_count_from_each_document(lengths):
    segments = np.repeat(np.arange(len(lengths)), lengths)
    np.testing.assert_array_equal(positions_from_segments(segments), np.concatenate([np.arange(n) for n in lengths]))


def test_a_fitting_experiment_has_no_problem():
    assert list(CausalLM().problems(experiment())) == []


def test_another_family_is_refused_and_its_objectives_are_named():
    (problem,) = CausalLM().problems(experiment(family="encoder"))
    assert problem.startswith("config.objective is CausalLM, which trains config.model.family decoder, not 'encoder'")
    assert "MaskedLM" in problem
    assert not {"Task", "TextTask", "WritingTask"} & set(re.findall(r"\w+", problem))  # No config can choose these.


def test_rows_longer_than_the_positions_are_refused():
    (problem,) = CausalLM().problems(experiment(length=65))
    assert "config.data.sequence_length 65" in problem and "config.model.position.max_length is 64" in problem


def test_rows_shorter_than_the_objective_needs_are_refused():
    (problem,) = SpanCorruption().problems(experiment("encoder_decoder", length=2))
    assert problem == "config.data.sequence_length is 2, SpanCorruption needs at least 3"
