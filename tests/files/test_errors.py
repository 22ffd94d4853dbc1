"""Tests the helpers that format messages."""

import numpy as np
import pytest

from pretrainax.files.errors import counted


@pytest.mark.parametrize(
    "number, noun, text",
    [
        (1, "step", "1 step"),
        (0, "row", "0 rows"),
        (2000, "batch", "2,000 batches"),
        (1, "process", "1 process"),
        (3, "process", "3 processes"),
        (np.int64(1), "input", "1 input"),
        (np.int64(2), "input", "2 inputs"),
    ],
)
def test_a_number_has_a_singular_or_plural_noun(number, noun, text):
    assert counted(number, noun) == text
