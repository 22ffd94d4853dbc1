"""Tests SequenceToSequence: teacher forcing, several pairs in one row, and `restore`."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.config import DataConfig, Experiment, ModelConfig, UserError
from pretrainax.data.collate import collate
from pretrainax.data.objectives import Lengths, ObjectiveInput, SequenceToSequence
from pretrainax.data.sources import TextFiles
from pretrainax.tokenization.base import Vocabulary

PAD, EOS, UNK = range(3)
VOCABULARY = Vocabulary(size=1000, pad=PAD, eos=EOS, unk=UNK)
TOKENS = st.lists(st.integers(3, 999), max_size=30)


def pair(source, target, end=EOS):
    """Makes a record in which each part ends with `end`, as in a corpus."""
    tokens = np.concatenate([source, [end], target, [end]]).astype(np.int32)
    return ObjectiveInput(tokens, np.ones(len(tokens), np.int32), np.array([len(source) + 1, len(tokens)]))


def example(source, target, vocabulary=VOCABULARY):
    text = pair(source, target, vocabulary.eos)
    return SequenceToSequence().example(text, np.random.default_rng(0), vocabulary)


def test_the_example_of_the_docstring():
    words = "<pad> </s> <unk> That is good . Das ist gut".split()
    ids = {word: i for i, word in enumerate(words)}
    source, target = ([ids[word] for word in text.split()] for text in ("That is good .", "Das ist gut ."))
    row = example(source, target)
    read = {name: " ".join(words[i] for i in row[name]) for name in ("encoder_tokens", "targets", "tokens")}
    assert read == {
        "encoder_tokens": "That is good . </s>",
        "targets": "Das ist gut . </s>",
        "tokens": "<pad> Das ist gut .",
    }
    assert row["loss_weights"].tolist() == [1.0] * 5


def test_pairs_share_a_row_and_do_not_see_each_other():
    row = collate([[example([3, 4], [5]), example([6], [7, 8])]], Lengths(14, 7, 7), PAD)
    assert {name: array[0].tolist() for name, array in row.items()} == {
        "encoder_tokens": [3, 4, EOS, 6, EOS, PAD, PAD],
        "encoder_segment_ids": [1, 1, 1, 2, 2, 0, 0],
        "encoder_positions": [0, 1, 2, 0, 1, 0, 0],
        "tokens": [PAD, 5, PAD, 7, 8, PAD, PAD],
        "segment_ids": [1, 1, 2, 2, 2, 0, 0],
        "positions": [0, 1, 0, 1, 2, 0, 0],
        "targets": [5, EOS, 7, 8, EOS, PAD, PAD],
        "loss_weights": [1, 1, 1, 1, 1, 0, 0],
    }


@pytest.mark.parametrize("target_length, targets", [(None, 512), (64, 64)])
def test_a_row_has_room_for_source_and_target(target_length, targets):
    objective = SequenceToSequence(target_length)
    lengths = objective.lengths(512)
    assert lengths == Lengths(512 + targets, 512, targets)
    assert objective.max_pair_lengths(lengths) == (512, targets)


def test_pairs_are_as_long_as_their_parts():
    sizes = np.array([[5, 3], [2, 9]])
    np.testing.assert_array_equal(SequenceToSequence().measure_pairs(sizes), sizes)


@given(TOKENS, TOKENS)
def test_the_pair_can_be_restored(source, target):
    row = example(source, target)
    np.testing.assert_array_equal(SequenceToSequence().restore(row, VOCABULARY), pair(source, target).tokens)


@pytest.mark.parametrize("kind", ["ByteBPE", "Unigram"])
def test_the_texts_can_be_restored(tokenizers_of_all_kinds, kind):
    tokenizer = tokenizers_of_all_kinds[kind]
    texts = "Thank you for inviting me!", "床前明月光，疑是地上霜。"
    row = example(*tokenizer.encode_batch(list(texts)), tokenizer.vocabulary)
    ids = SequenceToSequence().restore(row, tokenizer.vocabulary)
    decoded = tokenizer.decode(ids).split(tokenizer.special_pieces[tokenizer.vocabulary.eos])
    assert decoded == [*texts, ""]


def test_the_same_pair_gives_the_same_example():
    one, other = example([3, 4], [5]), example([3, 4], [5])
    assert all((one[name] == other[name]).all() for name in one)


def test_dtypes():
    dtypes = {name: str(array.dtype) for name, array in example([3], [4, 5]).items()}
    assert dtypes.pop("loss_weights") == "float32"
    assert set(dtypes.values()) == {"int32"}


def test_statistics_tell_lengths_and_missing_ends():
    rows = [example([3, 4], [5]), example([6], [7, 8, 9])]
    found = {s.name: s for s in SequenceToSequence().statistics(rows, VOCABULARY)}
    assert (found["source tokens"].measured, found["target tokens"].measured) == (2.5, 3.0)
    assert not any(s.is_off for s in found.values())
    rows[0]["targets"] = rows[0]["targets"][:-1]
    assert [s.name for s in SequenceToSequence().statistics(rows, VOCABULARY) if s.is_off] == ["targets with an end"]


def experiment(objective, source=None):
    return Experiment(ModelConfig(family="encoder_decoder"), None, DataConfig(source), objective, None, None)


def test_a_target_needs_a_token_and_its_end():
    objective = SequenceToSequence(target_length=1)
    line = "config.objective.target_length is 1, it must be at least 2"
    assert list(objective.problems(experiment(objective))) == [line]


def test_a_source_of_texts_is_refused():
    (line,) = SequenceToSequence().problems(experiment(SequenceToSequence(), TextFiles(path=".")))
    assert "needs pairs, but TextFiles in config.data.source has documents: set its target_field" in line


def test_a_vocabulary_without_pad_is_refused():
    with pytest.raises(UserError, match="no pad token, SequenceToSequence needs eos, pad; set config.tokenizer to Uni"):
        SequenceToSequence().check_vocabulary(dataclasses.replace(VOCABULARY, pad=None), 512)
