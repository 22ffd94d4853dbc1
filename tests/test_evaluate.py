"""The figures of an evaluation, by hand."""

import math

import numpy as np
import pytest

from pretrainax.evaluate import evaluate, summarize


def test_figures_of_sums_and_counts():
    figures = summarize({"loss": (6.0, 4.0), "accuracy": (1.0, 4.0)}, bytes_per_token=3.0)
    assert figures == pytest.approx(
        {
            "loss": 1.5,
            "perplexity": math.exp(1.5),
            "bits_per_token": 1.5 / math.log(2),
            "accuracy": 0.25,
            "loss_tokens": 4.0,
            "bits_per_byte": 0.5 / math.log(2),
        }
    )


def test_no_bits_per_byte_where_the_loss_is_no_likelihood_of_the_text():
    assert "bits_per_byte" not in summarize({"loss": (6.0, 4.0), "accuracy": (1.0, 4.0)})


def test_batches_are_added_before_they_are_divided():
    """A batch of 1 token with loss 4 and one of 3 tokens with loss 0: the mean is 1, that of the means would be 2."""
    batches = [{"n": 1.0, "loss": 4.0}, {"n": 3.0, "loss": 0.0}]

    def eval_step(params, batch):
        count = np.float32(batch["n"])
        return {"loss": (np.float32(batch["loss"]), count), "accuracy": (np.float32(0), count)}

    assert evaluate(eval_step, None, batches, None)["loss"] == 1.0
