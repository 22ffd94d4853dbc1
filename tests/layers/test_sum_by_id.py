"""Tests the sum over sorted ids, which GPUs use, on any device; it consists of products and comparisons."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.layers import sum_by_id
from pretrainax.layers.sum_by_id import BLOCK, sorted_sum_by_id

# float32 rounds each addition by 2^-24 of the running sum.
TOLERANCE = dict(rtol=1e-5, atol=1e-5)


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("count", "rows", "highest"),
    [
        (1000, 50, 60),  # Some ids have no row.
        (40 * BLOCK, 100, 3),  # The entries of one id fill many blocks.
        (5000, 1, 1),  # All entries have the same id.
        (BLOCK + 1, 7, 7),
        (BLOCK, 300, 300),  # Most rows have no token.
        (1, 5, 5),
    ],
)
def test_it_is_the_sum_of_each_id(count, rows, highest, variant):
    rng = np.random.default_rng(count)
    ids, x = rng.integers(0, highest, count), rng.standard_normal((count, 5)).astype(np.float32)
    expected = np.zeros((max(rows, highest), 5))
    np.add.at(expected, ids, x.astype(np.float64))
    summed = variant(functools.partial(sorted_sum_by_id, rows=rows))
    got = summed(jnp.asarray(ids, jnp.int32), jnp.asarray(x))
    np.testing.assert_allclose(got, expected[:rows], **TOLERANCE)


@pytest.mark.parametrize("rows", [1, 2, BLOCK, BLOCK + 1])
def test_a_gpu_sums_small_tables_without_sorting(rows, monkeypatch, variant):
    monkeypatch.setattr(sum_by_id, "platform", lambda: "gpu")
    rng = np.random.default_rng(rows)
    ids, x = rng.integers(0, rows + 1, (2, 300)), rng.standard_normal((2, 300, 5)).astype(np.float32)
    expected = np.zeros((rows + 1, 5))
    np.add.at(expected, ids, x.astype(np.float64))
    summed = functools.partial(sum_by_id.sum_by_id, rows=rows)
    got = variant(summed)(jnp.asarray(ids, jnp.int32), jnp.asarray(x))
    np.testing.assert_allclose(got, expected[:rows], **TOLERANCE)
    assert ("sort" in str(jax.make_jaxpr(summed)(ids, x))) == (rows > BLOCK)


def test_a_gpu_sums_the_gradients_of_chosen_positions_without_a_scatter(monkeypatch):
    rng = np.random.default_rng(0)
    x, wanted = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 9, 4), (2, 5, 4)))
    positions = jnp.asarray([[0, 3, 8, 3, 0], [1, 2, 3, 4, 0]])  # a position may occur twice: unused slots are 0

    def gradient():
        """Returns a new function, of which JAX has cached no trace for another platform."""
        return jax.grad(lambda x: (sum_by_id.vectors_at(x, positions) * wanted).sum())

    expected = gradient()(x)
    assert "scatter" in str(jax.make_jaxpr(gradient())(x))
    monkeypatch.setattr(sum_by_id, "platform", lambda: "gpu")
    np.testing.assert_allclose(gradient()(x), expected, **TOLERANCE)
    assert "scatter" not in str(jax.make_jaxpr(gradient())(x))


def test_a_row_at_the_edge_of_a_block_has_both_parts():
    ids = jnp.asarray([0] * (BLOCK - 2) + [1] * (2 * BLOCK) + [2] * 3, jnp.int32)
    got = sorted_sum_by_id(ids, jnp.ones((ids.size, 1)), 4)
    np.testing.assert_array_equal(got[:, 0], [BLOCK - 2, 2 * BLOCK, 3, 0])


def test_bfloat16_is_summed_in_float32():
    """Tests the sum of 1,024 ones; in bfloat16, such a sum would stop at 256."""
    got = sorted_sum_by_id(jnp.zeros(1024, jnp.int32), jnp.ones((1024, 2), jnp.bfloat16), 1)
    assert got.dtype == jnp.bfloat16 and got.tolist() == [[1024.0, 1024.0]]
