"""Tests the character ids of words, which are bilm-tf's ids plus one."""

import numpy as np

from pretrainax.config import NUM_CHARACTERS, WORD_LENGTH, ModelConfig, Recurrent
from pretrainax.data.collate import collate
from pretrainax.data.objectives import BidirectionalLM, ObjectiveInput
from pretrainax.data.token_inputs import token_inputs, with_token_inputs
from pretrainax.data.word_characters import character_table
from pretrainax.tokenization import Characters, Words

MODEL = ModelConfig(family="recurrent", parts=(Recurrent(),))
LONG = "a" * 60
TOKENIZER = Words(vocab_size=6).build(iter(["dog dog", f"dé dé {LONG}"]))  # </S> <S> <UNK> dog dé aaa…


def test_a_word_is_its_bytes_between_two_marks():
    table = character_table(TOKENIZER)
    assert table.shape == (6, WORD_LENGTH) and table.max() < NUM_CHARACTERS
    row = table[TOKENIZER.encode("dé")[0]]
    np.testing.assert_array_equal(row[:6], [259, 1 + ord("d"), 1 + 0xC3, 1 + 0xA9, 260, 261])
    assert set(row[6:]) == {261}


def test_a_long_word_loses_its_end():
    row = character_table(TOKENIZER)[TOKENIZER.encode(LONG)[0]]
    np.testing.assert_array_equal(row, [259, *[1 + ord("a")] * 48, 260])


def test_marks_of_a_text_are_characters_and_an_unknown_word_is_spelled_so():
    end, begin, unknown = character_table(TOKENIZER)[:3].tolist()
    assert begin[:4] == [259, 257, 260, 261] and end[:4] == [259, 258, 260, 261]
    assert unknown[1:6] == [1 + byte for byte in b"<UNK>"]


def test_padding_has_no_characters_and_neither_has_what_is_behind_a_text():
    tokenizer = Characters().build(iter(["ab"]))
    table = character_table(tokenizer)
    assert not table[tokenizer.vocabulary.pad].any() and table[1:].all()
    objective, tokens = BidirectionalLM(), TOKENIZER.encode("dog dé dog")
    example = objective.example(
        ObjectiveInput(tokens, np.ones_like(tokens)), np.random.default_rng(0), TOKENIZER.vocabulary
    )
    example = with_token_inputs(example, token_inputs(MODEL, TOKENIZER))
    batch = collate([[example], [example, example]], objective.lengths(7), pad=0)
    assert batch["characters"].shape == (2, 7, WORD_LENGTH) and batch["characters"].dtype == np.int32
    np.testing.assert_array_equal(batch["characters"].any(-1), batch["segment_ids"] > 0)
    np.testing.assert_array_equal(batch["characters"][1, 3:6], batch["characters"][0, :3])


def test_other_models_read_no_characters():
    assert token_inputs(ModelConfig(), TOKENIZER) == {}
    assert with_token_inputs({"tokens": np.ones(3, np.int32)}, {}).keys() == {"tokens"}
