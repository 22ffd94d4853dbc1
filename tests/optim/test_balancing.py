"""Tests the biases that balance the load of experts: their step, and the settings that keep them fixed."""

import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import LayersConfig, MixtureOfExperts
from pretrainax.optim.balancing import update_balance_biases

TOKENS = jnp.array([[6.0, 2.0, 4.0], [1.0, 1.0, 1.0]])  # tokens of two layers
SUMS = {"layers/decoder/1:1/expert_tokens": (TOKENS, jnp.ones(2)), "loss": (jnp.ones(()), jnp.ones(()))}


def tree(first=1):
    blocks = {"mlp": {"router": {"kernel": jnp.ones((2, 4, 3)), "balance": jnp.full((2, 3), 0.5)}}}
    return {"decoder": {"dense": {"blocks": {"mlp": {"up": {"kernel": jnp.ones((first, 4, 8))}}}}, "blocks": blocks}}


def moved(frozen=0, **settings):
    settings = MixtureOfExperts(**{"num_experts": 3, "bias_rate": 0.1} | settings)
    after = update_balance_biases(settings, LayersConfig(frozen=frozen), tree(), SUMS)
    router = after["decoder"]["blocks"]["mlp"]["router"]
    np.testing.assert_array_equal(router["kernel"], 1.0)
    return np.asarray(router["balance"]) - 0.5


def test_busy_experts_go_down_and_others_up():
    np.testing.assert_allclose(moved(), [[-0.1, 0.1, 0.0], [0.0, 0.0, 0.0]], atol=1e-7)  # float32 rounding


@pytest.mark.parametrize("rate", [0.0, None])
def test_without_a_rate_nothing_moves(rate):
    assert not moved(bias_rate=rate).any()


def test_frozen_layers_stay():
    assert moved(frozen=1).any()  # Only the first layer is frozen, and it has no experts.
    assert not moved(frozen=2).any()


def test_a_shared_layer_is_balanced_over_all_its_applications():
    shared = {"decoder": {"blocks": {"mlp": {"router": {"balance": jnp.zeros((1, 3))}}}}}
    after = update_balance_biases(MixtureOfExperts(num_experts=3, bias_rate=0.1), LayersConfig(), shared, SUMS)
    bias = after["decoder"]["blocks"]["mlp"]["router"]["balance"]
    np.testing.assert_allclose(bias, [[-0.1, 0.1, 0.0]], atol=1e-7)  # float32 rounding
