"""ELMo's presets have the published numbers of parameters; tests/zoo/test_written.py compares the outputs."""

import pytest

from pretrainax import zoo
from pretrainax.zoo.__main__ import count
from pretrainax.zoo.elmo import elmo


@pytest.mark.first(1)
@pytest.mark.parametrize("variant, published", [("original", 93.6), ("medium", 28.0), ("small", 13.6)])
def test_parameters_are_those_of_the_released_table(variant, published):
    config = elmo(variant)
    of_softmax = (config.d_model + 1) * config.vocab_size
    assert round((count(zoo.preset(f"elmo_{variant}")) - of_softmax) / 1e6, 1) == published
