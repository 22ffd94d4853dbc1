"""Compares learning-rate schedules with hand-computed values; float32 and the cosine round to about 1e-7."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pretrainax.optim.schedules import (
    WarmupConstant,
    WarmupCosine,
    WarmupInverseSquareRoot,
    WarmupLinear,
    WarmupStableDecay,
    WarmupSteps,
)


def rates(schedule, steps, peak=1.0):
    return [float(schedule.build(peak, steps)(jnp.int32(s))) for s in range(steps)]


def test_cosine_rises_by_equal_steps_and_falls_to_its_final_fraction():
    # The rate rises to 1/2 and 1, and then is 0.1 + 0.9 (1 + cos(pi k / 4)) / 2 for k = 0 … 3.
    expected = [0.5, 1.0, 1.0, 0.1 + 0.9 * (2 + 2**0.5) / 4, 0.55, 0.1 + 0.9 * (2 - 2**0.5) / 4]
    np.testing.assert_allclose(rates(WarmupCosine(2, 0.1), 6), expected, rtol=1e-6)


def test_linear_falls_by_equal_steps_and_its_last_rate_is_not_zero():
    np.testing.assert_allclose(rates(WarmupLinear(2), 6), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25], rtol=1e-6)


def test_inverse_square_root_has_half_the_peak_after_four_warmups():
    values = rates(WarmupInverseSquareRoot(4), 16, peak=2.0)
    np.testing.assert_allclose([values[0], values[3], values[15]], [0.5, 2.0, 1.0], rtol=1e-6)


def test_constant_stays_at_the_peak():
    np.testing.assert_allclose(rates(WarmupConstant(2), 4, peak=3.0), [1.5, 3.0, 3.0, 3.0], rtol=1e-6)


def test_stable_decay_falls_by_one_minus_the_square_root():
    # The rate rises to 1/2 and 1, and stays at the peak. Then it is 0.2 + 0.8 (1 - sqrt(k / 4)) for k = 0 … 3.
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 0.6, 0.2 + 0.8 * (1 - 0.5**0.5), 0.2 + 0.8 * (1 - 0.75**0.5)]
    np.testing.assert_allclose(rates(WarmupStableDecay(2, 4, 0.2), 8), expected, rtol=1e-6)


def test_stable_decay_without_a_decay_stays_at_the_peak():
    assert rates(WarmupStableDecay(0, 0), 4) == [1.0] * 4


def test_steps_fall_where_their_share_of_the_run_begins():
    # After the warmup, the rate is the peak until step 6 of 10, then half of the peak for 3 steps and a quarter for 1
    # step.
    found = rates(WarmupSteps(2, shares=(0.6, 0.9), factor=0.5), 10)
    np.testing.assert_allclose(found, [0.5, 1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25], rtol=1e-6)
    problems = list(WarmupSteps(shares=(0.5, 1.5), factor=0.0).problems(None))
    assert len(problems) == 2 and "shares is (0.5, 1.5)" in problems[0] and "factor is 0.0" in problems[1]


SCHEDULES = (
    *(WarmupCosine, WarmupLinear, WarmupInverseSquareRoot, WarmupConstant),
    *(WarmupStableDecay, WarmupSteps),
)


@pytest.mark.first(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_warmup_the_first_rate_is_the_peak(schedule):
    assert rates(schedule(warmup_steps=0), 2000)[0] == 1.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_are_those_of_the_formulas_to_float32_rounding_of_the_peak(schedule):
    warmup, steps, peak = 1000, 20_000, 3e-4
    step = np.arange(steps, dtype=np.float64)
    progress = (step - warmup) / (steps - warmup)
    falling = {
        WarmupCosine: 0.1 + 0.9 * (0.5 + 0.5 * np.cos(np.pi * progress)),
        WarmupLinear: 1.0 - progress,
        WarmupInverseSquareRoot: np.sqrt(warmup / (step + 1)),
        WarmupConstant: np.ones(steps),
        WarmupStableDecay: 1.0 - np.sqrt(np.maximum((step - (steps - 1000)) / 1000, 0.0)),
        WarmupSteps: np.where(step < 12_000, 1.0, np.where(step < 18_000, 0.316, 0.316**2)),
    }[schedule]
    expected = peak * np.where(step < warmup, (step + 1) / warmup, falling)
    found = jax.jit(jax.vmap(schedule(warmup_steps=warmup).build(peak, steps)))(jnp.arange(steps))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-7 * peak)


@pytest.mark.parametrize("start", [0.0, 0.5, 1.0])
def test_with_a_start_fraction_a_cosine_is_optaxs(start):
    # nanoT5 warms up from half of the peak.
    found = rates(WarmupCosine(4, 0.1, start_fraction=start), 12, peak=2.0)
    theirs = optax.warmup_cosine_decay_schedule(start * 2.0, 2.0, 4, 12, end_value=0.2)
    assert found == [float(theirs(jnp.int32(step))) for step in range(12)]
    np.testing.assert_allclose([found[0], found[2], found[4]], [2 * start, 1 + start, 2.0], rtol=1e-6)


def test_a_cosine_longer_than_the_run_is_cut():
    assert rates(WarmupCosine(2, cosine_steps=12), 6) == rates(WarmupCosine(2), 12)[:6]


def test_a_cosine_shorter_than_the_run_stays_at_its_final_rate():
    found = rates(WarmupCosine(2, 0.25, cosine_steps=6), 9)
    assert found[:6] == rates(WarmupCosine(2, 0.25), 6)
    np.testing.assert_allclose(found[6:], [0.25] * 3, rtol=1e-6)


def test_annealing_falls_linearly_to_zero_from_the_rate_of_its_first_step():
    np.testing.assert_allclose(
        rates(WarmupConstant(2, anneal_steps=4), 8), [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25], rtol=1e-6
    )
    found, without = (rates(WarmupCosine(2, anneal_steps=n), 12) for n in (5, 0))
    assert found[:8] == without[:8]
    np.testing.assert_allclose(found[7:], without[7] * np.linspace(1.0, 0.2, 5), rtol=1e-6)


def test_annealing_compiles():
    schedule = WarmupCosine(2, anneal_steps=5)
    found = jax.jit(lambda step: schedule.build(1.0, 12)(step))(jnp.int32(9))
    np.testing.assert_allclose(found, rates(schedule, 12)[9], rtol=1e-6)  # float32 rounding


def test_a_run_shorter_than_its_warmup_only_rises():
    np.testing.assert_allclose(rates(WarmupCosine(8), 4), [1 / 8, 2 / 8, 3 / 8, 4 / 8], rtol=1e-6)
