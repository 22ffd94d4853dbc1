"""Compares the random bits of hashed keys with independent fair draws.

For n draws, the deviation z of a count or a product has a normal distribution. Of ten million draws, 6 exceed 5
standard deviations. The keys are fixed, so that a test either always passes or always fails.
"""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.layers.hashed_keys import hashed_key

KEY = hashed_key(jax.random.key(0))
SHAPE = (16, 64, 256)
RATE = 0.1


def drawn(key) -> np.ndarray:
    """Returns 1 for the share RATE of the numbers and 0 for the others, standardized to mean 0 and deviation 1."""
    hit = np.asarray(jax.random.bits(key, SHAPE, jnp.uint32)) < RATE * 2**32
    return (hit - RATE) / np.sqrt(RATE * (1 - RATE))


def deviations(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the correlation of two arrays in standard deviations from 0."""
    return abs((a * b).mean()) * np.sqrt(a.size)


@pytest.mark.parametrize("seed", range(3))
def test_a_share_is_drawn_wherever_one_looks(seed):
    hits = drawn(hashed_key(jax.random.key(seed)))
    assert abs(hits.mean()) * np.sqrt(hits.size) < 5
    for axes in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        sums = hits.sum(axes) / np.sqrt(hits.size / hits.sum(axes).size)
        # The numerator is a chi-squared value minus its mean. The denominator is its standard deviation.
        assert abs(np.square(sums).sum() - sums.size) / np.sqrt(2 * sums.size) < 5


def test_neighbours_are_drawn_apart():
    hits = drawn(KEY)
    for axis, distance in itertools.product(range(3), (1, 2, 3, 4, 7, 8, 15)):
        rows = np.moveaxis(hits, axis, 0)
        assert deviations(rows[distance:], rows[:-distance]) < 5


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_each_byte_of_the_numbers_is_even(shift):
    counts = np.bincount((np.asarray(jax.random.bits(KEY, SHAPE, jnp.uint32)) >> shift).ravel() & 255, minlength=256)
    expected = np.prod(SHAPE) / 256
    assert abs((np.square(counts - expected) / expected).sum() - 255) < 5 * np.sqrt(2 * 255)


def test_keys_made_of_one_draw_apart():
    keys = [KEY, *jax.random.split(KEY, 5), *(jax.random.fold_in(KEY, i) for i in (0, 1, 2, 2**31))]
    keys += [jax.random.fold_in(keys[1], 1), jax.random.key(0, impl=jax.random.key_impl(KEY))]
    # `split` computes the same keys as `fold_in`, so duplicates are removed.
    keys = list({tuple(np.asarray(jax.random.key_data(key))): key for key in keys}.values())
    assert len(keys) == 9
    for a, b in itertools.combinations(map(drawn, keys), 2):
        assert deviations(a, b) < 5


def test_no_two_of_many_keys_are_one():
    data = np.asarray(jax.random.key_data(jax.random.split(KEY, 2**16)))
    assert len(np.unique(data, axis=0)) == 2**16


def test_numbers_are_the_same_compiled_mapped_and_of_more_rows():
    bits = lambda key: jax.random.bits(key, SHAPE, jnp.uint32)  # noqa: E731
    keys = jax.random.split(KEY, 2)
    np.testing.assert_array_equal(jax.jit(bits)(KEY), bits(KEY))
    np.testing.assert_array_equal(jax.vmap(bits)(keys), jnp.stack([bits(key) for key in keys]))
    np.testing.assert_array_equal(jax.random.bits(KEY, (32, *SHAPE[1:]), jnp.uint32)[:16], bits(KEY))


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16])
def test_fewer_bits_are_the_first_ones(dtype):
    few, all_bits = (np.asarray(jax.random.bits(KEY, SHAPE, kind)) for kind in (dtype, jnp.uint32))
    np.testing.assert_array_equal(few, all_bits >> (32 - 8 * few.itemsize))


def test_jax_draws_by_them():
    x = jax.random.normal(KEY, SHAPE)
    assert abs(float(x.mean())) * np.sqrt(x.size) < 5
    assert abs(float(x.std()) - 1) * np.sqrt(2 * x.size) < 5
    chex.assert_tree_all_finite(x)
    with jax.enable_x64(True), pytest.raises(ValueError, match="8, 16 or 32 bits, not 64"):
        jax.random.bits(KEY, (2,), jnp.uint64)
