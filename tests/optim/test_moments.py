"""Tests moments in bfloat16: rounding keeps the mean, small changes are not lost, and sharding changes nothing."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.optim import AdamW
from pretrainax.optim.moments import round_stochastically

PARAMS = {"mlp": {"wi": {"kernel": jnp.ones((64, 64))}}}


def updated(optimizer: AdamW, gradients, steps: int):
    """Returns the updates and the state after several updates with the same gradients."""
    transform = optimizer.build(lambda _: 1e-3, PARAMS)
    state = transform.init(PARAMS)
    step = jax.jit(lambda state, i: transform.update(gradients, state, PARAMS, step=i))
    for i in range(steps):
        updates, state = step(state, i)
    return updates, state


def adam_state(state):
    (found,) = (x for x in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "nu")) if hasattr(x, "nu"))
    return found


def test_a_number_becomes_a_neighbor_and_keeps_its_mean():
    x = jnp.full(100_000, 1 + 2**-9 + 2**-11, jnp.float32)  # The number is between 1 and 1 + 2^-7, at 5/16 of the gap.
    found = np.asarray(round_stochastically(x, jax.random.key(0)), np.float32)
    assert set(np.unique(found)) == {1.0, 1 + 2.0**-7}
    # The tolerance is four standard errors of a share of 100,000 draws.
    assert abs(np.mean(found > 1) - 5 / 16) < 4 * np.sqrt(5 / 16 * 11 / 16 / 1e5)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, np.inf, -np.inf, np.nan, 2.0**-130])
def test_a_number_that_bfloat16_has_and_a_number_that_is_not_finite_stay(value):
    found = round_stochastically(jnp.full(1000, value, jnp.float32), jax.random.key(1))
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.float32(value))


def test_the_second_moment_rises_and_falls_by_less_than_the_distance_of_bfloat16_numbers():
    """Tests that the moment approaches its limit; its distance shrinks by 1/1000 per update.

    Rounding to the nearest number would stop at about 1/4.
    """
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    _, state = updated(AdamW(b2=0.999, moment_dtype="bfloat16", clip_norm=None), ones, 2000)
    nu = np.asarray(adam_state(state).nu["mlp"]["wi"]["kernel"], np.float32)
    # One rounding has a standard deviation of at most 2^-9. The moment remembers about 500 roundings, and the mean is
    # over 4,096 elements: 2^-9 · sqrt(500) / 64 = 7e-4.
    np.testing.assert_allclose(nu.mean(), 1 - 0.999**2000, atol=4 * 7e-4)


def test_the_moments_take_half_of_the_bytes_and_the_first_update_is_that_of_float32_moments():
    gradients = jax.tree.map(lambda x: 0.01 * jax.random.normal(jax.random.key(2), x.shape), PARAMS)
    plain, half = (updated(AdamW(moment_dtype=dtype), gradients, 1) for dtype in ("float32", "bfloat16"))
    chex.assert_trees_all_equal(plain[0], half[0])
    sizes = [
        sum(x.nbytes for x in jax.tree.leaves((state.mu, state.nu))) for state in map(adam_state, (plain[1], half[1]))
    ]
    assert sizes == [2 * 4 * 64 * 64, 2 * 2 * 64 * 64]


def test_two_moments_of_one_shape_draw_different_numbers():
    x = jax.tree.map(
        lambda a: jnp.full_like(a, 1 + 2**-8),
        {"mlp": {"wi": {"kernel": jnp.ones((64, 64))}, "wo": {"kernel": jnp.ones((64, 64))}}},
    )
    transform = AdamW(b1=0.0, moment_dtype="bfloat16", clip_norm=None).build(lambda _: 1e-3, x)
    _, state = transform.update(x, transform.init(x), x, step=0)
    mu = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(adam_state(state).mu)]
    assert 0.4 < np.mean(mu[0] == mu[1]) < 0.6  # These are two fair coin flips.


def test_eight_devices_draw_the_numbers_of_one():
    key, x = jax.random.key(3), jax.random.normal(jax.random.key(4), (16, 8))
    mesh = jax.make_mesh((8,), ("x",))
    split = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    np.testing.assert_array_equal(*(np.asarray(jax.jit(round_stochastically)(a, key), np.float32) for a in (x, split)))
