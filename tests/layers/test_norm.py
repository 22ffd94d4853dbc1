import chex
import jax
import jax.numpy as jnp
import numpy as np

from pretrainax.config import ModelConfig
from pretrainax.layers.norm import Norm

X = np.random.default_rng(0).normal(3.0, 2.0, size=(2, 5, 8)).astype(np.float32)
SCALE, BIAS = (np.random.default_rng(i).normal(size=8).astype(np.float32) for i in (1, 2))


def test_layer_norm(variant):
    norm = Norm(ModelConfig(norm="layer", norm_epsilon=1e-3))
    y = variant(norm.apply)({"params": {"scale": SCALE, "bias": BIAS}}, X)
    mean, variance = X.mean(-1, keepdims=True), X.var(-1, keepdims=True)
    # float32 rounding
    np.testing.assert_allclose(y, (X - mean) / np.sqrt(variance + 1e-3) * SCALE + BIAS, rtol=1e-5, atol=1e-5)


def test_rms_norm(variant):
    y = variant(Norm(ModelConfig(norm="rms", norm_epsilon=1e-3)).apply)({"params": {"scale": SCALE}}, X)
    # float32 rounding
    np.testing.assert_allclose(y, X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-3) * SCALE, rtol=1e-5, atol=1e-5)


def test_only_a_layer_norm_with_biases_has_a_bias():
    def names(**kwargs):
        return set(Norm(ModelConfig(**kwargs)).init(jax.random.key(0), X)["params"])

    assert names(norm="layer") == {"scale", "bias"}
    assert names(norm="layer", use_bias=False) == {"scale"}
    assert names(norm="rms") == {"scale"}


def test_bfloat16_is_normalised_in_float32():
    x = jnp.asarray(X + 100.0, jnp.bfloat16)  # A mean in bfloat16 would have an error of up to 0.25.
    norm = Norm(ModelConfig(norm="layer"))
    params = norm.init(jax.random.key(0), x)
    exact = norm.apply(params, x.astype(jnp.float32))
    assert norm.apply(params, x).dtype == jnp.bfloat16
    # The result is rounded once, at the end, to 8 bits.
    np.testing.assert_allclose(norm.apply(params, x).astype(jnp.float32), exact, rtol=2**-8)


def test_a_bfloat16_row_without_variance_is_finite():
    # Rounding could make the mean of the squares smaller than the square of the mean.
    x = jnp.full((1, 1, 768), 103.0, jnp.bfloat16)
    norm = Norm(ModelConfig(norm="layer", norm_epsilon=1e-12))
    assert jnp.isfinite(norm.apply(norm.init(jax.random.key(0), x), x)).all()


def test_a_norm_that_starts_around_one_is_an_rms_norm_of_scale_one():
    one, plain = (Norm(ModelConfig(norm=norm)) for norm in ("rms_plus_one", "rms"))
    starts = [norm.init(jax.random.key(0), X) for norm in (one, plain)]
    chex.assert_trees_all_equal(starts[0]["params"]["scale"] + 1, starts[1]["params"]["scale"])
    chex.assert_trees_all_close(one.apply(starts[0], X), plain.apply(starts[1], X))
