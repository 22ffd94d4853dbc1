"""One model of each kind: logits, loss, gradients and three updates equal golden files of transformers and torch."""

import pytest

from tests.golden import CASES, make
from tests.support.parity import check, differences
from tests.support.updates import assert_updates_land_at


@pytest.mark.parametrize("name", [*make.UPDATED, "elmo", "gemma2"])
def test_logits_loss_and_gradients_are_those_of_the_file(name):
    check(differences(name, make.golden(name)))


@pytest.mark.parametrize("name", make.UPDATED)
def test_three_updates_are_those_of_the_file(name):
    assert_updates_land_at(make.golden(f"updates/{name}"), CASES[name])


@pytest.mark.parametrize("name, mesh", [("bert", {"data": 8}), ("llama3", {"data": 2, "fsdp": 2, "sequence": 2})])
def test_three_updates_of_micro_batches_on_eight_devices_are_those_of_the_file(name, mesh):
    # The batch has three rows. Each of the three micro-batches contains one of them, 16 times.
    assert_updates_land_at(make.golden(f"updates/{name}"), CASES[name], copies=16, accumulate=3, **mesh)
