"""Attention with its projections: shapes, finite gradients, and the wrong axes that it refuses."""

import chex
import jax
import jax.numpy as jnp
import pytest

from pretrainax.config import ModelConfig
from pretrainax.layers.attention import Mask
from pretrainax.layers.compute import Compute
from pretrainax.layers.multi_head import MultiHeadAttention
from pretrainax.layers.positions import PositionTerms
from tests.support.attending import assert_close, packed_ids

CONFIG = ModelConfig(vocab_size=8, num_layers=1, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2)
IDS = packed_ids(2, 24), packed_ids(2, 30)
X, SOURCE = (jax.random.normal(jax.random.key(i), (*ids.shape, 32)) for i, ids in enumerate(IDS))
LAYER = MultiHeadAttention(CONFIG, Compute())


@pytest.fixture(scope="module")
def params():
    return LAYER.init(jax.random.key(0), X, SOURCE, Mask(False, *IDS), PositionTerms())


def test_what_is_read_may_have_another_length(params):
    y, _ = LAYER.apply(params, X, SOURCE, Mask(False, *IDS), PositionTerms())
    chex.assert_shape(y, (2, 24, 32))
    chex.assert_type(y, jnp.float32)


def test_key_heads_may_be_fewer(params):
    shapes = {name: part["kernel"].shape for name, part in params["params"].items()}
    assert shapes == {"query": (32, 4, 8), "key": (32, 2, 8), "value": (32, 2, 8), "out": (4, 8, 32)}


def test_jit_changes_nothing_of_output_and_gradients(params):
    def loss(params, x, source):
        return jnp.sum(jnp.square(LAYER.apply(params, x, source, Mask(False, *IDS), PositionTerms())[0]))

    both = jax.value_and_grad(loss, (0, 1, 2))
    got, expected = jax.jit(both)(params, X, SOURCE), both(params, X, SOURCE)
    chex.assert_tree_all_finite(got)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    assert_close(got, expected, 1e-5 * scale)  # float32 sums of some hundred terms, in another order


@pytest.mark.parametrize(
    "x, source, said",
    [
        (X[0], SOURCE, r"x is \[B, T, D\]"),
        (X, SOURCE[:1], "with B and D of x"),
        (X, SOURCE[..., :1], "with B and D of x"),
    ],
)
def test_a_source_that_would_broadcast_is_refused_by_its_axis(params, x, source, said):
    with pytest.raises(AssertionError, match=said):
        LAYER.apply(params, x, source, Mask(False, *IDS), PositionTerms())
