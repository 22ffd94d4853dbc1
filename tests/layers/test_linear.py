import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import ModelConfig
from pretrainax.layers.linear import Linear, normal_init

INIT = jax.nn.initializers.normal(1.0)
HEADS = Linear((3, 5), ("d_model", "num_heads", "head_dim"), INIT)
BACK = Linear((4,), ("num_heads", "head_dim", "d_model"), INIT)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_maps_to_heads(variant):
    x = normal(2, 7, 4)
    params = {"kernel": normal(4, 3, 5), "bias": normal(3, 5)}
    expected = np.einsum("BTD,DHK->BTHK", x, params["kernel"]) + params["bias"]
    # float32 rounding of sums of 4
    np.testing.assert_allclose(variant(HEADS.apply)({"params": params}, x), expected, rtol=1e-5, atol=1e-5)


def test_maps_back_from_heads(variant):
    x = normal(2, 7, 3, 5)
    params = {"kernel": normal(3, 5, 4), "bias": normal(4)}
    expected = np.einsum("BTHK,HKD->BTD", x, params["kernel"]) + params["bias"]
    # float32 rounding of sums of 15
    np.testing.assert_allclose(variant(BACK.apply)({"params": params}, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "layer, shape, equation", [(HEADS, (2, 7, 4), "BTD,DHK->BTHK"), (BACK, (2, 7, 3, 5), "BTHK,HKD->BTD")]
)
def test_gradients_are_those_of_an_einsum(layer, shape, equation):
    x = jnp.asarray(normal(*shape))
    params = layer.init(jax.random.key(0), x)["params"]

    def loss(params, x):
        return jnp.sum(jnp.sin(layer.apply({"params": params}, x)))

    def expected(params, x):
        y = jnp.einsum(equation, x, params["kernel"])
        return jnp.sum(jnp.sin(y + params["bias"].reshape((1, 1, *layer.features))))

    got, want = (jax.grad(f, argnums=(0, 1))(params, x) for f in (loss, expected))
    # float32 sums in another order
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


def test_bfloat16_input_gives_bfloat16_output_and_float32_gradients():
    x = jnp.ones((2, 7, 4), jnp.bfloat16)
    params = HEADS.init(jax.random.key(0), x)["params"]
    assert HEADS.apply({"params": params}, x).dtype == jnp.bfloat16
    gradient = jax.grad(lambda p: jnp.sum(HEADS.apply({"params": p}, x).astype(jnp.float32)))(params)
    assert gradient["kernel"].dtype == jnp.float32


def test_axes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not fit features"):
        Linear((3, 5), ("num_heads", "head_dim"), INIT).init(jax.random.key(0), jnp.ones((2, 7, 4)))


def stddev(**kwargs):
    config = ModelConfig(**{k: v for k, v in kwargs.items() if k not in ("gain", "residual")})
    init = normal_init(config, fan_in=64, gain=kwargs.get("gain", 1.0), residual=kwargs.get("residual", False))
    return float(jnp.std(init(jax.random.key(0), (400, 400), jnp.float32)))


@pytest.mark.parametrize(
    "kwargs, expected",
    [
        (dict(init_stddev=0.02, gain=0.5), 0.02),
        (dict(init_stddev=0.02, scale_residual_init=True, num_layers=8), 0.02),
        (dict(init_stddev=0.02, scale_residual_init=True, num_layers=8, residual=True), 0.02 / 4),
        (dict(init_stddev=None), 1 / 8),
        (dict(init_stddev=None, gain=0.5), 1 / 16),
    ],
)
def test_deviation_of_the_init(kwargs, expected):
    # The standard deviation of 160,000 draws has a relative error of 0.2 %.
    assert stddev(**kwargs) == pytest.approx(expected, rel=0.01)
