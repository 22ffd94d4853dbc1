"""The unigram baseline, worked out by hand."""

import math

import numpy as np
import pytest

from pretrainax.data.baseline import unigram_baseline


def batch(targets, weights):
    return {"targets": np.array([targets], np.int32), "loss_weights": np.array([weights], np.float32)}


def test_by_hand():
    train = [batch([0, 0], [1, 1]), batch([1, 2], [1, 0])]  # counts 2, 1, 0, 0; smoothed 3, 2, 1, 1 of 7
    valid = [batch([0, 2], [1, 1]), batch([0, 3], [1, 0])]  # counts 2, 0, 1, 0
    scores = unigram_baseline(train, valid, vocab_size=4)
    # the same few float64 operations in another order
    assert scores["loss"] == pytest.approx(-(2 * math.log(3 / 7) + math.log(1 / 7)) / 3, rel=1e-12)
    assert scores["accuracy"] == pytest.approx(2 / 3, rel=1e-12)


def test_without_training_targets_all_tokens_are_alike():
    scores = unigram_baseline([], [batch([3, 1], [1, 1])], vocab_size=8)
    assert scores["loss"] == pytest.approx(math.log(8), rel=1e-12)  # one rounding of a float64 logarithm
