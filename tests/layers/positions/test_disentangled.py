import importlib.util

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import DisentangledPositions, ModelConfig
from pretrainax.layers.positions import AttentionPositions, disentangled, positions_for
from pretrainax.layers.positions.disentangled import RelativeTable, disentangled_bias, log_bucket, rows_by_distance


def test_buckets_by_hand():
    # Each direction has 4 buckets. Distances 0, 1 and 2 are exact. Distances 3 … 8 = 2 · 4^(0 … 1] form one range. For
    # keys after the query, distances from 9 have a row of their own. For keys before the query, they share the row of
    # the range.
    distances = np.array([0, 1, 2, 3, 8, 9, 50, -1, -2, -3, -8, -9, -50])
    rows = [4, 5, 6, 7, 7, 7, 7, 3, 2, 1, 1, 0, 0]
    np.testing.assert_array_equal(log_bucket(distances, num_buckets=4, max_distance=9), rows)


def test_published_buckets_at_their_borders():
    distances = np.array([0, 127, 128, 129, 510, 511, 512, 4096, -128, -511, -512])
    rows = [256, 383, 384, 385, 511, 511, 511, 511, 128, 1, 0]
    np.testing.assert_array_equal(log_bucket(distances, num_buckets=256, max_distance=512), rows)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("buckets, farthest", [(256, 512), (256, 1024), (4, 9), (6, 13), (5, 11), (8, 17), (32, 128)])
def test_buckets_are_those_of_transformers(buckets, farthest):
    import torch
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    distances = np.arange(-3000, 3001)
    theirs = make_log_bucket_position(torch.from_numpy(distances), buckets, farthest).long().numpy() + buckets
    ours = log_bucket(distances, buckets, farthest)
    np.testing.assert_array_equal(ours, np.clip(theirs, 0, 2 * buckets - 1))


@pytest.mark.parametrize("length", (1, 7, 12))
def test_bias_is_the_definition(monkeypatch, length, variant):
    monkeypatch.setattr(disentangled, "_BLOCK", 4)  # 12 tokens form three blocks of 4; 7 tokens form one block.
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 2, length, 3, 5))
    position_q, position_k = rng.normal(size=(2, 2 * length - 1, 3, 5))
    expected = np.zeros((2, 3, length, length))
    for i in range(length):
        for j in range(length):
            d = i - j + length - 1
            expected[:, :, i, j] = (q[:, i] * position_k[d] + k[:, j] * position_q[d]).sum(-1)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, position_q, position_k)]
    np.testing.assert_allclose(variant(disentangled_bias)(*arrays), expected, atol=1e-5)  # float32 sums of 10 products


def test_bias_of_bfloat16_is_rounded_once_per_term_and_once_as_a_sum():
    rng = np.random.default_rng(0)
    shapes = (2, 8, 3, 64), (2, 8, 3, 64), (15, 3, 64), (15, 3, 64)
    q, k, position_q, position_k = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    bias = disentangled_bias(q, k, position_q, position_k)
    assert bias.dtype == jnp.bfloat16
    exact = [x.astype(jnp.float32) for x in (q, k, position_q, position_k)]
    terms = [disentangled_bias(*exact[:2], *pair) for pair in ((exact[2] * 0, exact[3]), (exact[2], exact[3] * 0))]
    # bfloat16 rounds each term once, and the sum once, each by at most 2⁻⁸ of the value. The sum is at most as large as
    # both terms together.
    bound = 2**-8 * 2 * (abs(terms[0]) + abs(terms[1]))
    assert np.all(abs(bias.astype(jnp.float32) - sum(terms)) <= bound)


CONFIG = ModelConfig(d_model=6, position=DisentangledPositions(num_buckets=4, max_distance=9))


def test_a_short_text_needs_a_part_of_the_table():
    rows, which = rows_by_distance(CONFIG, 3, 3)
    np.testing.assert_array_equal(rows, [2, 3, 4, 5, 6])
    np.testing.assert_array_equal(which, [0, 1, 2, 3, 4])
    rows, which = rows_by_distance(CONFIG, 20, 20)
    np.testing.assert_array_equal(rows, np.arange(8))
    assert which.shape == (39,)


def test_the_table_is_normed_row_by_row():
    params = RelativeTable(CONFIG).init(jax.random.key(0), 3, 3)
    table = RelativeTable(CONFIG).apply(params, 3, 3)
    assert params["params"]["embedding"].shape == (8, 6)
    np.testing.assert_allclose(table.mean(-1), 0, atol=1e-6)
    # The norm's epsilon changes the standard deviation of vectors of size 0.02.
    np.testing.assert_allclose(table.std(-1), 1, atol=0.02)


class Logits(nn.Module):
    """Computes the bias of `places` for queries and keys, with separate maps."""

    places: AttentionPositions

    @nn.compact
    def __call__(self, q, k):
        terms = positions_for(CONFIG).terms(self.places, causal=False, dtype=q.dtype)
        to_query, to_key = (nn.DenseGeneral((3, 2), name=name) for name in ("query", "key"))
        return terms.bias(CONFIG, to_query(q), to_key(k), to_query, to_key, 0.5)


@pytest.mark.first(1)
@pytest.mark.parametrize("t, length", [(0, 1), (5, 1), (11, 1), (3, 4)])
def test_queries_after_other_tokens_have_their_rows_of_the_square(t, length):
    x = jax.random.normal(jax.random.key(1), (2, 12, 6))
    positions = jnp.tile(jnp.arange(12), (2, 1))
    square, params = Logits(AttentionPositions(positions)).init_with_output(jax.random.key(0), x, x)
    part, end = slice(t, t + length), t + length
    got = Logits(AttentionPositions(positions[:, part], before=t)).apply(params, x[:, part], x[:, :end])
    chex.assert_shape(got, (2, 3, length, end))
    # float32 rounding; the products have other shapes
    chex.assert_trees_all_close(got, square[:, :, part, :end], atol=1e-5)
