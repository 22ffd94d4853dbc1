import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import MixtureOfExperts, ModelConfig
from pretrainax.layers.feed_forward import FEED_FORWARDS, Dense, Mixture, feed_forwards_of, register_feed_forward
from pretrainax.layers.feed_forward.base import ungated_activation

X = jax.random.normal(jax.random.key(0), (2, 3, 4))


def config(**fields):
    return ModelConfig(**{"d_model": 4, "d_ff": 6, "activation": "relu", "init_stddev": 0.5} | fields)


def kind_of(config):
    ((name, kind, own),) = feed_forwards_of(config)
    assert name == "mlp" and own is config
    return kind


@pytest.mark.parametrize("gated", (False, True))
def test_by_hand(gated, variant):
    module = kind_of(config(gated=gated))(config(gated=gated))
    params = module.init(jax.random.key(1), X)
    y, sums = variant(module.apply)(params, X)
    kernels = jax.tree.map(np.asarray, params["params"])  # Biases start at 0.
    x = np.asarray(X)
    hidden = np.maximum(x @ kernels["gate" if gated else "up"]["kernel"], 0)
    hidden = hidden * (x @ kernels["up"]["kernel"]) if gated else hidden
    np.testing.assert_allclose(y, hidden @ kernels["down"]["kernel"], atol=1e-5)  # float32 sums of 6 products
    chex.assert_shape(y, X.shape)
    assert not sums


def test_relu_saves_its_output_and_has_the_gradients_of_relu():
    x = jnp.array([-2.0, -0.0, 0.0, 1e-30, 3.0])
    activation = ungated_activation(config())
    value, backward = jax.vjp(activation, x)
    np.testing.assert_array_equal(value, jax.nn.relu(x))
    np.testing.assert_array_equal(backward(x + 5)[0], jax.vjp(jax.nn.relu, x)[1](x + 5)[0])
    assert any(np.array_equal(saved, value) for saved in jax.tree.leaves(backward))

    def squares(f):  # the gradient of a gradient, as Sophia computes it
        return jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(f(x) ** 3))(x)))(x)

    np.testing.assert_allclose(squares(activation), squares(jax.nn.relu), rtol=1e-6)  # float32 rounding of a product


def test_the_config_says_which():
    assert kind_of(config()) is Dense and kind_of(config(experts=MixtureOfExperts())) is Mixture


def test_behind_experts_there_may_be_one_more_for_all_tokens():
    experts = MixtureOfExperts(d_ff=5, dense_after=7)
    (name, kind, own), (after, dense, its) = feed_forwards_of(config(experts=experts))
    assert (name, kind, own) == ("mlp", Mixture, config(experts=experts))
    assert (after, dense, its) == ("mlp_after", Dense, config(d_ff=7))


def test_a_kind_that_is_added_goes_before_those_that_were_there(monkeypatch):
    monkeypatch.setattr("pretrainax.layers.feed_forward.base.FEED_FORWARDS", [*FEED_FORWARDS])

    @register_feed_forward
    class Wide(Dense):
        partition_rules = ()

        @staticmethod
        def is_in(config):
            return config.d_ff > 100

    assert kind_of(config(d_ff=101)) is Wide and kind_of(config()) is Dense


def test_flops_are_those_of_the_products():
    for gated, maps in ((False, 2), (True, 3)):
        assert kind_of(config(gated=gated)).flops(config(gated=gated), 5) == 2 * 5 * 4 * 6 * maps


def test_bfloat16_stays_bfloat16():
    module = Dense(config())
    y, _ = module.init_with_output(jax.random.key(1), X.astype(jnp.bfloat16))[0]
    chex.assert_type(y, jnp.bfloat16)
