"""Tests that the classification head pools each document of a row separately if the task is to choose one of them."""

import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.models.heads.classify import pooled_segments

SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 0, 0], [1, 2, 2, 2, 2, 2, 3, 3], [0] * 8])
POOLED = {"cls": lambda x: x[0], "last": lambda x: x[-1], "mean": lambda x: x.mean(0), "max": lambda x: x.max(0)}


@pytest.mark.first(3)
@pytest.mark.parametrize("pooling", POOLED)
def test_each_text_is_pooled_by_itself(pooling):
    x = np.random.RandomState(0).standard_normal((3, 8, 4)).astype(np.float32)
    found = pooled_segments(jnp.array(x), jnp.array(SEGMENTS), 3, pooling)
    wanted = [[POOLED[pooling](row[ids == i]) for i in (1, 2, 3)] for row, ids in zip(x[:2], SEGMENTS, strict=False)]
    np.testing.assert_allclose(found[:2], wanted, atol=1e-6)
    assert np.isfinite(found).all() and not found[2].any()  # This row contains only padding.
