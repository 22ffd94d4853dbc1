"""Compares models that transformers lacks with their torch implementations in tests/support/written.py."""

import chex
import jax
import numpy as np
import pytest

from pretrainax.optim.decay import decay_mask
from pretrainax.sharding.param_paths import parameter_names
from tests.golden.case import weights
from tests.support import written
from tests.support.parity import check, differences
from tests.support.tiers import few
from tests.support.updates import LEARNING_RATE, STEPS, update_torch, updated

pytest.importorskip("torch")  # extra parity


@pytest.mark.parametrize("name", few(written.CASES | written.OF_ELMO, ["palm", "elmo"]))
def test_as_written(name):
    check(differences(name, written.reference(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", written.CASES)
def test_three_updates_land_where_torch_does(name):
    params, start = written.parameters(name), weights(written.CASES[name].config)
    decays = dict(zip(parameter_names(start), jax.tree.leaves(decay_mask(start)), strict=True))
    update_torch(params, decays, lambda: written.forward(name, params)["loss"])
    theirs = jax.tree.unflatten(jax.tree.structure(start), [p.detach().numpy() for p in params.values()])
    # The tolerance of tests/zoo/test_parity.py.
    chex.assert_trees_all_close(updated(written.CASES[name]), theirs, atol=1e-4, rtol=0)
    moved = jax.tree.map(lambda b, a: float(np.abs(b - a).max()), theirs, start)
    assert max(jax.tree.leaves(moved)) > STEPS * LEARNING_RATE / 2
