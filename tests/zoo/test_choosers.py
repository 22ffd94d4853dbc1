"""Heads of multiple choice compute the same as transformers' classes: logits, gradients, names."""

import dataclasses

import numpy as np
import pytest

from pretrainax.zoo.family import without_heads
from tests.golden import CASES
from tests.golden.case import Case, batch, needs_transformers, packed
from tests.support.heads import assert_same_gradients, gradients_of, oracle, ours_of
from tests.support.tiers import few

pytestmark = pytest.mark.slow

NAMES = ("bert", "distilbert", "roberta", "electra_small", "albert", "deberta", "modernbert")
LABELS = np.array([2], np.int32)


def with_head(name: str) -> Case:
    case = CASES[name]
    head = dataclasses.replace(case.family.huggingface.multiple_choice_class.head, num_labels=3)
    return Case(dataclasses.replace(without_heads(case.config), head=head), case.family, pad_id=case.pad_id)


def choices_of(case: Case) -> dict[str, np.ndarray]:
    """Returns three texts of different lengths, each in a row with padding."""
    config = dataclasses.replace(case.config, head=None, masked_lm_head=True)
    names = ("tokens", "segment_ids", "positions", "token_types")
    return {name: x for name, x in batch(case._replace(config=config)).items() if name in names}


@needs_transformers
@pytest.mark.parametrize("name", few(NAMES, ["bert", "deberta"]))
def test_as_transformers(name):
    import torch

    case = with_head(name)
    apart = choices_of(case)
    logits, loss, gradients = ours_of(case, packed(apart) | {"labels": LABELS})
    t = {name: torch.from_numpy(x.astype(np.int64))[None] for name, x in apart.items()}
    given = {"input_ids": t["tokens"], "attention_mask": t["segment_ids"]}
    given |= {"token_type_ids": t["token_types"]} if "token_types" in t else {}
    model = oracle(case)
    theirs = model(**given, labels=torch.from_numpy(LABELS.astype(np.int64)))
    theirs.loss.backward()
    np.testing.assert_allclose(logits, theirs.logits.detach().numpy(), atol=2e-4, rtol=0)
    np.testing.assert_allclose(loss, theirs.loss.item(), rtol=1e-5)
    assert_same_gradients(gradients, gradients_of(model, case))


def test_config_json_says_it_both_ways():
    for name in NAMES:
        case = with_head(name)
        huggingface = case.family.huggingface
        described = huggingface.write_config(case.config)
        assert described["architectures"][0].endswith("ForMultipleChoice")
        assert huggingface.read_config(described).head == case.config.head
