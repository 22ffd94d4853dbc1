import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import LongContextScaling, ModelConfig, RelativePositionBuckets
from pretrainax.layers.position import RelativeBias, relative_bucket, rotary_angles, rotate, sinusoidal


def test_sinusoidal_by_hand():
    got = sinusoidal(jnp.array([[0, 1, 50]]), 4)
    # wavelengths 2 pi and 2 pi * 100, sines first
    expected = [[np.sin(p), np.sin(p / 100), np.cos(p), np.cos(p / 100)] for p in (0, 1, 50)]
    np.testing.assert_allclose(got[0], expected, atol=1e-5)  # float32 sines of angles up to 50


def test_rotary_by_hand():
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    cosines, sines = rotary_angles(jnp.array([[7]]), 4, 100.0)
    a, b = 7.0, 0.7  # the planes are (0, 2) and (1, 3); theta^(-1/2) is 0.1
    expected = [
        np.cos(a) - 3 * np.sin(a),
        2 * np.cos(b) - 4 * np.sin(b),
        3 * np.cos(a) + np.sin(a),
        4 * np.cos(b) + 2 * np.sin(b),
    ]
    np.testing.assert_allclose(rotate(x, cosines, sines)[0, 0, 0], expected, rtol=1e-5)  # float32 rounding


def test_rotary_products_depend_on_the_distance_only():
    q, k = (jax.random.normal(jax.random.key(i), (1, 4, 1, 8)) for i in (0, 1))

    def products(start):
        positions = start + jnp.arange(4)[None]
        angles = rotary_angles(positions, 8, 10_000.0)
        return jnp.einsum("BTHK,BSHK->BHTS", rotate(q, *angles), rotate(k, *angles))

    # angles of up to 1,000 in float32 are right to 6e-5
    np.testing.assert_allclose(products(0), products(1000), atol=1e-3)


def test_long_context_scaling_by_hand():
    # In a context of 100, planes turn 100 w / 2 pi = 15.9, 1.59, 0.159 and 0.0159 times.
    scaling = LongContextScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=100)
    cosines, _ = rotary_angles(jnp.array([[1]]), 8, 10_000.0, scaling)
    turns = 10 / (2 * np.pi)
    kept = (turns - 1) / 3
    frequencies = [1.0, 0.1 * (kept + (1 - kept) / 8), 0.01 / 8, 0.001 / 8]
    np.testing.assert_allclose(cosines[0, 0], np.cos(frequencies), rtol=1e-6)  # float32 rounding


def test_buckets_of_both_directions_by_hand():
    # 32 buckets, 16 a direction: 0..7 exact, then 8 ranges between 8 and 128, each 16^(1/8) = 1.414 times as far:
    # 8 11.3 16 22.6 32 45.3 64 90.5 128
    table = {0: 0, -1: 1, -7: 7, -8: 8, -11: 8, -12: 9, -15: 9, -16: 10, -22: 10, -23: 11, -31: 11, -32: 12, -45: 12}
    table |= {-46: 13, -63: 13, -64: 14, -90: 14, -91: 15, -128: 15, -5000: 15}
    table |= {-distance: 16 + bucket for distance, bucket in table.items() if distance}
    got = relative_bucket(np.array(list(table)), 32, 128, bidirectional=True)
    np.testing.assert_array_equal(got, list(table.values()))


def test_buckets_of_the_past_by_hand():
    # 32 buckets: 0..15 exact, then 16 ranges between 16 and 128, each 8^(1/16) = 1.139 times as far: 16 18.2 20.7 …
    table = {5: 0, 0: 0, -1: 1, -15: 15, -16: 16, -18: 16, -19: 17, -20: 17, -21: 18, -112: 30, -113: 31, -9999: 31}
    got = relative_bucket(np.array(list(table)), 32, 128, bidirectional=False)
    np.testing.assert_array_equal(got, list(table.values()))


def test_relative_bias_looks_up_each_pair():
    config = ModelConfig(num_heads=3, position=RelativePositionBuckets(num_buckets=8, max_distance=6))
    for bidirectional in (True, False):
        bias, params = RelativeBias(config, bidirectional).init_with_output(jax.random.key(0), 9)
        distance = np.arange(9)[None, :] - np.arange(9)[:, None]  # key's place - query's place
        table = np.asarray(params["params"]["embedding"])
        expected = table[relative_bucket(distance, 8, 6, bidirectional)]  # [T, T, H]
        np.testing.assert_array_equal(bias, expected.transpose(2, 0, 1)[None])
