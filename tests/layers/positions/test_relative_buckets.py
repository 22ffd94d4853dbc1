import chex
import jax
import numpy as np
import pytest

from pretrainax.config import ModelConfig, RelativePositionBuckets
from pretrainax.layers.positions.relative_buckets import RelativeBias, relative_bucket


def test_buckets_of_both_directions_by_hand():
    # There are 32 buckets, 16 for each direction. Distances 0..7 are exact. Then come 8 ranges between 8 and 128, each
    # 16^(1/8) = 1.414 times as long as the previous one: 8 11.3 16 22.6 32 45.3 64 90.5 128.
    table = {0: 0, -1: 1, -7: 7, -8: 8, -11: 8, -12: 9, -15: 9, -16: 10, -22: 10, -23: 11, -31: 11, -32: 12, -45: 12}
    table |= {-46: 13, -63: 13, -64: 14, -90: 14, -91: 15, -128: 15, -5000: 15}
    table |= {-distance: 16 + bucket for distance, bucket in table.items() if distance}
    got = relative_bucket(np.array(list(table)), 32, 128, bidirectional=True)
    np.testing.assert_array_equal(got, list(table.values()))


def test_buckets_of_the_past_by_hand():
    # There are 32 buckets. Distances 0..15 are exact. Then come 16 ranges between 16 and 128, each 8^(1/16) = 1.139
    # times as long as the previous one: 16 18.2 20.7 …
    table = {5: 0, 0: 0, -1: 1, -15: 15, -16: 16, -18: 16, -19: 17, -20: 17, -21: 18, -112: 30, -113: 31, -9999: 31}
    got = relative_bucket(np.array(list(table)), 32, 128, bidirectional=False)
    np.testing.assert_array_equal(got, list(table.values()))


def test_relative_bias_looks_up_each_pair():
    config = ModelConfig(num_heads=3, position=RelativePositionBuckets(num_buckets=8, max_distance=6))
    for bidirectional in (True, False):
        bias, params = RelativeBias(config, bidirectional).init_with_output(jax.random.key(0), 9, 9)
        distance = np.arange(9)[None, :] - np.arange(9)[:, None]  # position of the key - position of the query
        table = np.asarray(params["params"]["embedding"])
        expected = table[relative_bucket(distance, 8, 6, bidirectional)]  # [T, T, H]
        np.testing.assert_array_equal(bias, expected.transpose(2, 0, 1)[None])


@pytest.mark.parametrize("bidirectional", (False, True))
def test_one_query_against_all_keys_has_its_row_of_the_square(bidirectional):
    config = ModelConfig(num_heads=3, position=RelativePositionBuckets(num_buckets=8, max_distance=6))
    module = RelativeBias(config, bidirectional)
    square, params = module.init_with_output(jax.random.key(0), 12, 12)
    for t in range(12):
        chex.assert_trees_all_equal(module.apply(params, 1, 12, -t), square[:, :, t : t + 1])


@pytest.mark.slow
def test_some_queries_against_more_keys_have_their_rows_of_the_square():
    config = ModelConfig(num_heads=3, position=RelativePositionBuckets(num_buckets=8, max_distance=6))
    module = RelativeBias(config, bidirectional=True)
    square, params = module.init_with_output(jax.random.key(0), 12, 12)
    chex.assert_trees_all_equal(module.apply(params, 4, 12, -5), square[:, :, 5:9])
    chex.assert_trees_all_equal(module.apply(params, 4, 3, 2 - 5), square[:, :, 5:9, 2:5])
