"""Tests the numbers that the compiled update takes as arguments. `test_update_parity.py` tests the updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import TrainConfig
from pretrainax.optim import AdamW, Muon, WarmupConstant, WarmupCosine
from pretrainax.optim.arguments import arguments_of, numbers_of, rate_in, update_key
from tests.support.tiny import get_config


def arrays_of(schedule, steps):
    numbers = numbers_of(schedule, TrainConfig(steps=steps), AdamW())
    found = numbers.arrays(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, numbers.shapes())
    return found


@pytest.mark.parametrize("steps", [1, 64, 65, 100])
def test_the_table_has_the_rates_of_the_schedule(steps):
    schedule = WarmupCosine(warmup_steps=7).build(3e-3, steps)
    rate, expected = rate_in(arrays_of(schedule, steps)["rates"]), [float(schedule(step)) for step in range(steps)]
    found = [rate(jnp.int32(step)) for step in range(steps)]
    # 1 + cosine is at most 2, so float32 rounds it by at most 1.2e-7 of the peak.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-7 * 3e-3)


def test_steps_after_the_table_have_its_last_rate():
    rates = arrays_of(WarmupConstant(0).build(1e-3, 10), 10)["rates"]
    assert float(rate_in(rates)(jnp.int32(10_000))) == np.float32(1e-3)


def test_a_rate_of_none_is_no_argument():
    assert arguments_of(Muon(learning_rate=0.5, adam_learning_rate=None)) == {"learning_rate": 0.5, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("path", "value", "same"),
    [
        *[("train.seed", 5, True), ("train.steps", 99, True), ("optimizer.weight_decay", 0.5, True)],
        *[("schedule", WarmupConstant(3), True), ("evaluate.every", 7, True), ("checkpoint.every", 7, True)],
        *[("optimizer.b1", 0.5, False), ("train.z_loss", 1e-4, False), ("model.num_layers", 3, False)],
        *[("layers.rate_decay", 0.5, False), ("checkpoint.init_from", "elsewhere", False)],
    ],
)
def test_the_key_of_an_update_leaves_out_its_arguments(path, value, same):
    experiment = get_config("gpt")
    *parents, name = path.split(".")
    setattr(getattr(experiment, parents[0]) if parents else experiment, name, value)
    assert (update_key(experiment) == update_key(get_config("gpt"))) is same


def test_a_rate_of_none_has_another_key_than_a_number():
    keys = []
    for rate in (None, 1e-3, 2e-3):
        experiment = get_config("gpt")
        experiment.optimizer = Muon(learning_rate=0.5, adam_learning_rate=rate)
        keys.append(update_key(experiment))
    assert keys[0] != keys[1] == keys[2]
