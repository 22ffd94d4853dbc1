"""Tests that the special tokens of pretraining frame each text, and that truncation cuts the longest text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.data.framing import decoder_start, special_token_frame, truncate_longest_first
from pretrainax.tokenization.base import Vocabulary

BERT = Vocabulary(99, pad=0, unk=1, cls=2, sep=3, mask=4)
ROBERTA = Vocabulary(99, bos=0, cls=0, pad=1, eos=2, sep=2, unk=3, mask=4)
T5 = Vocabulary(99, pad=0, eos=1, unk=2)
LLAMA = Vocabulary(99, unk=0, bos=1, eos=2)
GPT2 = Vocabulary(99, bos=50, eos=50)
A, B = np.array([10, 11]), np.array([20])


@pytest.mark.parametrize(
    "family, vocabulary, row, numbers",
    [
        ("encoder", BERT, [2, 10, 11, 3, 20, 3], [0, 0, 0, 0, 1, 1]),
        ("encoder", ROBERTA, [0, 10, 11, 2, 2, 20, 2], [0, 0, 0, 0, 0, 1, 1]),
        ("encoder_decoder", ROBERTA, [0, 10, 11, 2, 2, 20, 2], [0, 0, 0, 0, 0, 1, 1]),
        ("encoder_decoder", T5, [10, 11, 1, 20, 1], [0, 0, 0, 1, 1]),
        ("decoder", LLAMA, [1, 10, 11, 2, 20, 2], [0, 0, 0, 0, 1, 1]),
        ("decoder", GPT2, [10, 11, 50, 20, 50], [0, 0, 0, 1, 1]),
    ],
)
def test_a_pair_is_framed_as_in_pretraining(family, vocabulary, row, numbers):
    frame = special_token_frame(family, vocabulary)
    found, types = frame.wrap([A, B])
    assert found.tolist() == row and types.tolist() == numbers
    assert frame.count(2) == len(row) - 3 and frame.count(1) == len(frame.wrap([A])[0]) - 2


def test_a_decoder_of_two_stacks_starts_as_its_family_does():
    assert decoder_start(ROBERTA) == ROBERTA.eos and decoder_start(T5) == T5.pad


@pytest.mark.slow
@given(st.lists(st.integers(0, 30), min_size=1, max_size=3), st.integers(0, 60))
def test_the_longest_gives_way_token_by_token(sizes, room):
    wanted = list(sizes)
    while sum(wanted) > room:  # the last of the longest lists loses a token, as in transformers' "longest_first"
        longest = max(wanted)
        wanted[len(wanted) - 1 - wanted[::-1].index(longest)] -= 1
    assert truncate_longest_first(sizes, room) == wanted
