"""Tests that the metrics of the comparison of tokenizers are equal to counts by hand."""

import pytest

from pretrainax.tokenization import Characters, Unigram, WordPiece
from pretrainax.tokenization.compare import _config, measure

LETTERS = Characters().build(iter(["abcdefghijklmnopqrstuvwxyz \n"]))


def test_metrics_by_hand():
    found = measure(LETTERS, ["ab ab", "a?"])
    assert (found["tokens"], found["bytes_per_token"], found["tokens_per_word"]) == (7, 1.0, 7 / 3)
    assert found["unknown_share"] == 1 / 7 and found["restored_share"] == 5 / 7  # "a?" is not restored.
    assert (found["pieces"], found["pieces_used"], found["pieces_below_10"]) == (28, 3, 28)


@pytest.mark.slow
def test_fields_of_the_config_hold_for_its_kind():
    given = WordPiece(vocab_size=300, lowercase=False)
    assert _config(given, WordPiece, 500) == WordPiece(vocab_size=500, lowercase=False)
    assert _config(given, Unigram, 500) == Unigram(vocab_size=500)
