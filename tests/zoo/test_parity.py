"""Each published architecture equals its reference in logits, hidden states, gradients and three updates."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import RandomBlocks
from pretrainax.layers.compute import Compute
from tests.golden import CASES, make
from tests.golden.case import batch, needs_transformers, packed, weights
from tests.support.parity import ALL, check, differences, ours
from tests.support.tiers import ALWAYS, few
from tests.support.updates import assert_updates_land_at, updated


# tests/zoo/test_golden_steps.py compares the models in UPDATED.
@pytest.mark.first(4)
@pytest.mark.parametrize("name", few(ALL, ALWAYS - set(make.UPDATED)))
def test_as_the_golden_file(name):
    check(differences(name, make.golden(name)))


@pytest.mark.first(3)
@needs_transformers
@pytest.mark.parametrize("name", few(CASES))
def test_as_transformers(name):
    check(differences(name, make.reference(name)))


# BigBird draws its blocks for a row, whatever texts the row contains.
@pytest.mark.first(2)
@pytest.mark.parametrize(
    "name",
    few(n for n, x in ALL.items() if not (x.config.pair_head or isinstance(x.config.sparse_attention, RandomBlocks))),
)
def test_packed_rows_give_the_logits_of_rows_of_their_own(name):
    arrays, config = batch(ALL[name]), ALL[name].config
    model = models.build(config, Compute())
    outputs = jax.jit(lambda p, b: model.apply({"params": p}, b, deterministic=True))(weights(config), packed(arrays))
    heads = {"lm": "logits", "backward_lm": "backward_logits", "replaced": "replaced_logits"}
    for head, output in outputs.heads.items():
        got = output.logits if head == "replaced" else output.logits()
        # The same sums with additional zeros.
        np.testing.assert_allclose(got[0], ours(name)[heads[head]][arrays["segment_ids"] > 0], atol=2e-4, rtol=0)


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_three_updates_land_where_torch_does(name):
    assert_updates_land_at(make.updated(name), CASES[name])


# One or three key heads, and odd numbers of filters, support fewer axes.
ON_EIGHT = dict.fromkeys(ALL, dict(data=2, fsdp=2, tensor=2)) | {"elmo": dict(data=4, tensor=2)}
ON_EIGHT |= dict.fromkeys(["palm", "gemma1", "gemma3_1b", "t5gemma_9b_2b"], dict(data=2, fsdp=4))


@pytest.mark.slow
@pytest.mark.parametrize("name", few(ON_EIGHT, ["palm"]))
def test_three_updates_land_on_eight_devices_where_they_do_on_one(name):
    case = ALL[name]._replace(config=dataclasses.replace(ALL[name].config, vocab_size=100))
    one, eight = updated(case, copies=8), updated(case, copies=8, **ON_EIGHT[name])
    chex.assert_trees_all_close(eight, one, atol=1e-4, rtol=0)  # as above


@pytest.mark.parametrize("name", CASES)
def test_config_json_says_the_same_architecture(name):
    case = CASES[name]
    json = case.family.huggingface.write_config(case.config)  # write_config also reads its result back and compares
    assert case.family.huggingface.read_config(json).family == case.config.family


@pytest.mark.slow
def test_gathered_head_gives_the_same_logits_at_its_positions():
    case = CASES["bert_masked_lm"]
    model, arrays = models.build(case.config, Compute()), batch(case)
    positions = np.array([[0, 3, 11], [8, 2, 1], [4, 0, 0]], np.int32)
    gathered = model.apply(
        {"params": weights(case.config)}, arrays | {"masked_positions": positions}, deterministic=True
    )
    everywhere = ours("bert_masked_lm")["logits"]
    # The same sums, in products of another shape.
    np.testing.assert_allclose(
        gathered.heads["lm"].logits(), np.take_along_axis(everywhere, positions[:, :, None], 1), atol=1e-4
    )
