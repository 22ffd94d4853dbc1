"""Compares BigBird's blocks with transformers' class, for rows as long as in the paper, in training and evaluation."""

import dataclasses

import numpy as np
import pytest

from pretrainax.config import Classify, Extract, LearnedPositions, RandomBlocks, UserError
from pretrainax.inference.verification.reference import sparse_inputs
from pretrainax.interop.architectures import describe_model, described_model
from pretrainax.zoo.family import differences, without_heads
from tests.golden.case import Case, needs_transformers, weights
from tests.golden.encoders import BIGBIRD, tiny
from tests.golden.make import oracle
from tests.support.exports import our_logits
from tests.support.tiers import few


def rows(length):
    """Returns a full row, and a row with padding."""
    random = np.random.RandomState(0)
    real = np.arange(length)[None] < np.array([[length], [length - 70]])
    return {
        "tokens": np.where(real, random.randint(3, 99, real.shape), 0).astype(np.int32),
        "segment_ids": real.astype(np.int32),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), real.shape),
        "token_types": random.randint(0, 2, real.shape).astype(np.int32),
    }


@pytest.mark.first(1)
@needs_transformers
@pytest.mark.parametrize(
    "drawn", few(["always", "training"], ["training"])
)  # random blocks as in transformers' training, and as in its evaluation
# 1,024 tokens draw blocks as in the paper. 800 tokens draw them differently, and padding fills the last block.
@pytest.mark.parametrize("length", [1024, 800])
def test_logits_of_long_rows_are_those_of_transformers(length, drawn):
    import torch

    config = tiny(BIGBIRD, position=LearnedPositions(1024), sparse_attention=RandomBlocks(), pair_head=True)
    theirs, arrays = oracle(Case(config, BIGBIRD)), rows(length)
    config = dataclasses.replace(config, sparse_attention=RandomBlocks(drawn=drawn))
    t = {name: torch.from_numpy(x.astype(np.int64)) for name, x in arrays.items()}
    sparse_inputs(config, theirs, t)
    with torch.no_grad():
        out = theirs(t["tokens"], attention_mask=t["segment_ids"], token_type_ids=t["token_types"])
    expected = out.prediction_logits.numpy()
    real = arrays["segment_ids"] > 0
    # The tolerance of all parity tests.
    np.testing.assert_allclose(our_logits(config, weights(config), arrays)[real], expected[real], atol=2e-4, rtol=0)


@pytest.mark.parametrize("head", [None, Classify(num_labels=3, kind="single", hidden="model"), Extract(True, True)])
def test_full_attention_of_an_import_is_exported(head):
    config = dataclasses.replace(tiny(BIGBIRD), sparse_attention=None, head=head)
    config = config if head is None else without_heads(config)
    family, config_json, _ = describe_model(config, "big_bird")
    assert (family.model_type, config_json["attention_type"]) == ("big_bird", "original_full")
    assert not differences(described_model(config_json)[1], config)


def test_blocks_of_null_tokens_are_one_line_that_names_the_key():
    config_json = describe_model(tiny(BIGBIRD), None)[1]
    for key in ("block_size", "num_random_blocks"):
        with pytest.raises(UserError, match=f"{key} null, which 'big_bird' does not support"):
            described_model(config_json | {key: None})
