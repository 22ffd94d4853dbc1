import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import ModelConfig
from pretrainax.layers.convolution import InputConvolution

CONFIG = ModelConfig(d_model=4, input_convolution=3, activation="relu")
MODULE = InputConvolution(CONFIG)
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0]])
X = jax.random.normal(jax.random.key(0), (1, 6, 4))


def random_params():
    params = MODULE.init(jax.random.key(1), X, SEGMENTS, True)["params"]
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return jax.tree.unflatten(structure, [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


@pytest.mark.first(1)
def test_a_token_is_seen_with_its_neighbours_of_the_same_segment(variant):
    params = random_params()
    got = variant(lambda x: MODULE.apply({"params": params}, x, SEGMENTS, True))(X).convolved
    kernel, bias, x = np.asarray(params["kernel"]), np.asarray(params["bias"]), np.asarray(X[0])
    expected = np.stack(
        [
            sum(x[t + i - 1] @ kernel[i] for i in range(3) if 0 <= t + i - 1 < 6 and SEGMENTS[0, t + i - 1] == s)
            for t, s in enumerate(SEGMENTS[0])
        ]
    )
    np.testing.assert_allclose(got[0], np.maximum(expected + bias, 0), atol=1e-5)  # float32 sums of 12 products


def test_the_join_norms_the_sum():
    params = random_params()
    branch = MODULE.apply({"params": params}, X, SEGMENTS, True)
    joined = branch.join(2 * X, CONFIG)
    total = np.asarray(2 * X + branch.convolved)
    normed = (total - total.mean(-1, keepdims=True)) / np.sqrt(total.var(-1, keepdims=True) + CONFIG.norm_epsilon)
    expected = normed * np.asarray(params["norm"]["scale"]) + np.asarray(params["norm"]["bias"])
    np.testing.assert_allclose(joined, expected, atol=1e-5)  # float32 rounding


def test_segments_of_other_rows_are_named():
    with pytest.raises(AssertionError, match=r"segment_ids are \[B, T\]"):
        MODULE.init(jax.random.key(1), X, SEGMENTS[:, :1], True)
