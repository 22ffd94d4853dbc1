"""Tests that the token offsets assign each prediction to its token of the corpus."""

import numpy as np
import pytest

from pretrainax.data.objectives import (
    CausalLM,
    DecoderOnly,
    Denoising,
    MaskedLM,
    ObjectiveInput,
    PrefixLM,
    SequentialDenoising,
    SpanCorruption,
)
from pretrainax.tokenization.base import Vocabulary

VOCABULARY = Vocabulary(size=200, pad=0, eos=1, unk=2, cls=3, sep=4, mask=5, bos=6, sentinels=tuple(range(150, 200)))
OBJECTIVES = [
    CausalLM(),
    CausalLM(mask_documents=True),
    PrefixLM(),
    MaskedLM(),
    SpanCorruption(),
    SpanCorruption(0.5, 8.0),
    SequentialDenoising(),
    Denoising(permutation_rate=0.0),
    DecoderOnly(objective=SpanCorruption()),
    DecoderOnly(objective=SequentialDenoising()),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_each_token_of_text_is_found_at_its_offset(objective, seed):
    """All tokens of the text differ, so a target identifies its token."""
    text = np.arange(50, 90, dtype=np.int32)
    segments = np.repeat(np.arange(1, 5, dtype=np.int32), 10)
    example = objective.example(ObjectiveInput(text, segments), np.random.default_rng(seed), VOCABULARY)
    offsets = objective.token_offsets(example, VOCABULARY)
    if isinstance(objective, MaskedLM):
        tokens, weights = example["tokens"].copy(), np.ones(len(example["tokens"]))
        tokens[example["masked_positions"]] = example["targets"]
    else:
        tokens, weights = example["targets"], example["loss_weights"]
    is_text = (tokens >= 50) & (tokens < 90) & (weights > 0)
    assert is_text.any() and len(offsets) == len(example["tokens"])
    np.testing.assert_array_equal(text[offsets[is_text]], tokens[is_text])
