import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.layers.embedding import Embedding

MODULE = Embedding(7, 3, jax.nn.initializers.normal(1.0))
IDS = jnp.array([[0, 6, 2], [2, 2, 1]])
PARAMS = MODULE.init(jax.random.key(0), IDS)


def test_looks_up_rows(variant):
    got = variant(MODULE.apply)(PARAMS, IDS)
    chex.assert_shape(got, (2, 3, 3))
    chex.assert_trees_all_equal(got, PARAMS["params"]["embedding"][IDS])


def test_the_gradient_of_a_row_is_the_sum_of_those_of_its_tokens(variant):
    weights = jax.random.normal(jax.random.key(1), (2, 3, 3))
    gradient = variant(jax.grad(lambda params: jnp.sum(weights * MODULE.apply(params, IDS))))(PARAMS)
    expected = np.zeros((7, 3), np.float32)
    np.add.at(expected, np.asarray(IDS), np.asarray(weights))
    chex.assert_trees_all_close(gradient["params"]["embedding"], expected)


@pytest.mark.slow
def test_ids_of_one_axis_are_named():
    with pytest.raises(AssertionError, match=r"ids are \[B, T\]"):
        MODULE.apply(PARAMS, IDS[0])
