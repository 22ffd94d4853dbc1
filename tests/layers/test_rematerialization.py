"""Compares functions whose backward saves only their inputs with plain autodiff of the same formulas."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import ModelConfig
from pretrainax.layers import norm
from pretrainax.layers.feed_forward import ACTIVATIONS, Dense
from pretrainax.layers.norm import Norm
from pretrainax.layers.rematerialization import recompute

BATCH, LENGTH, WIDTH = 3, 5, 64
KINDS = [(kind, bias) for kind in ("layer", "rms", "rms_plus_one") for bias in (False, True)[: 1 + (kind == "layer")]]
# Both sides compute in float32 and sum in another order. Each side rounds a bfloat16 result once, to 8 bits.
ERRORS = {jnp.float32: 1e-6, jnp.bfloat16: 2**-7}
DTYPES = pytest.mark.parametrize("dtype", ERRORS, ids=lambda dtype: dtype.__name__)


def draw(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def with_gradients(function, *inputs):
    """Returns the value of a function, and the gradients of its weighted sum."""
    y, vjp = jax.vjp(function, *inputs)
    return y, vjp(draw(9, *y.shape).astype(y.dtype))


def assert_close(found, wanted, error):
    """Compares trees of arrays; the error of each array is relative to its largest number."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=error * np.abs(b).max())


def norm_of(kind: str, use_bias: bool, dtype):
    """Returns the norm as a function of its parameters and x, the same norm for plain autodiff, and the arguments."""
    module = Norm(ModelConfig(norm=kind, use_bias=use_bias))
    x = (3.0 + 2.0 * draw(0, BATCH, LENGTH, WIDTH)).astype(dtype)
    params = jax.tree.map(lambda p: p + 0.3 * draw(1, *p.shape), module.init(jax.random.key(0), x))

    def plain(params, x):
        scale = params["params"]["scale"] + float(kind == "rms_plus_one")
        bias = params["params"].get("bias")
        return norm._normalize_with_residuals(kind == "layer", module.config.norm_epsilon, x, scale, bias)[0]

    return module.apply, plain, (params, x)


@pytest.mark.parametrize("name, approximate", [("gelu", False), ("gelu_tanh", True)])
def test_gelu_is_that_of_jax_in_float32_and_as_good_as_bfloat16_holds(name, approximate):
    x = jnp.linspace(-6, 6, 2001)
    plain = functools.partial(jax.nn.gelu, approximate=approximate)
    np.testing.assert_array_equal(ACTIVATIONS[name](x), plain(x))
    rounded = x.astype(jnp.bfloat16)
    found = with_gradients(ACTIVATIONS[name], rounded)
    wanted = with_gradients(plain, rounded.astype(jnp.float32))
    gradient = draw(9, *x.shape)  # The gradient is rounded before and after the multiplication.
    scales = jnp.abs(wanted[0]), jnp.abs(gradient) + jnp.abs(wanted[1][0])
    for a, b, scale in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), scales, strict=True):
        assert a.dtype == jnp.bfloat16
        # In float32, 1 + erf is within 6e-8 of 0 for large negative x; gelu multiplies it by x.
        assert (np.abs(np.asarray(a, np.float32) - b) <= 2**-8 * scale + 1e-6).all()


@DTYPES
@pytest.mark.parametrize("kind, use_bias", KINDS)
def test_a_norm_has_the_gradients_of_its_formula(kind, use_bias, dtype):
    ours, plain, arguments = norm_of(kind, use_bias, dtype)
    assert_close(with_gradients(ours, *arguments), with_gradients(plain, *arguments), ERRORS[dtype])


def mlp(gated: bool, activation: str, use_bias: bool, dtype):
    """Returns a feed-forward, the same feed-forward for plain autodiff, and the arguments."""
    module = Dense(
        ModelConfig(d_model=WIDTH, d_ff=32, activation=activation, gated=gated, use_bias=use_bias, init_stddev=0.5)
    )
    x = draw(0, BATCH, LENGTH, WIDTH).astype(dtype)
    params = jax.tree.map(lambda p: p + 0.1 * draw(1, *p.shape), module.init(jax.random.key(0), x))

    def plain(params, x):
        def linear(name, x):
            y = jnp.einsum("BTD,DF->BTF", x, params["params"][name]["kernel"].astype(dtype))
            bias = params["params"][name].get("bias", jnp.zeros(y.shape[-1]))
            return y + bias.astype(dtype)[None, None]

        hidden = ACTIVATIONS[activation](linear("gate" if gated else "up", x))
        return linear("down", hidden * linear("up", x) if gated else hidden)

    return lambda *arguments: module.apply(*arguments)[0], plain, (params, x)


@pytest.mark.first(10)
@DTYPES
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True], ids=("plain", "gated"))
def test_a_feed_forward_has_the_gradients_of_its_formula(gated, activation, use_bias, dtype):
    ours, plain, arguments = mlp(gated, activation, use_bias, dtype)
    # In bfloat16, this package sums the gradients of kernels over 15 tokens in float32; einsum rounds them to 8 bits.
    assert_close(with_gradients(ours, *arguments), with_gradients(plain, *arguments), 4 * ERRORS[dtype])


@pytest.mark.parametrize(
    "case",
    [*(functools.partial(norm_of, *kind, jnp.float32) for kind in KINDS)]
    + [functools.partial(mlp, gated, "gelu", True, jnp.float32) for gated in (False, True)],
    ids=lambda case: "-".join(getattr(part, "__name__", str(part)) for part in (case.func, *case.args[:-1])),
)
def test_a_gradient_has_the_derivative_of_a_gradient(case):
    """Tests gradients of gradients, as Sophia computes them: forward-mode differentiation along a direction."""
    ours, plain, arguments = case()
    direction = jax.tree.map(lambda x: draw(5, *x.shape), arguments)

    def along(function):
        def gradient(*xs):
            return with_gradients(lambda *xs: jnp.sin(function(*xs)), *xs)[1]

        return jax.jvp(gradient, arguments, direction)[1]

    assert_close(along(ours), along(plain), 1e-5)  # float32: the terms of nested sums cancel


@pytest.mark.first(1)
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_can_be_mapped(axis):
    ours, plain, (params, x) = norm_of("layer", True, jnp.float32)
    found, wanted = (with_gradients(jax.vmap(functools.partial(f, params), in_axes=axis), x) for f in (ours, plain))
    assert_close(found, wanted, ERRORS[jnp.float32])


def test_the_inputs_alone_are_kept():
    x, y = draw(0, 4, 8), draw(1, 4, 8)

    def function(x, y):
        return jnp.tanh(jnp.exp(x) * jnp.sin(y))

    ours, plain = (jax.tree.leaves(jax.vjp(f, x, y)[1]) for f in (recompute(function), function))
    assert {id(leaf) for leaf in ours} == {id(x), id(y)} and len(plain) > 2


@pytest.mark.first(1)
@pytest.mark.parametrize("unroll", [1, 3])
def test_the_compiler_does_not_keep_what_is_made_again(unroll):
    """Tests that temporary memory holds only the inputs of 6 applications, in a loop with 1 or 3 per iteration."""

    def function(x):
        return jnp.sin(jnp.exp(jnp.sin(jnp.exp(jnp.sin(x)))))

    def temporaries(function):
        def loss(x):
            return jnp.sum(jax.lax.scan(lambda x, _: (function(x), None), x, None, length=6, unroll=unroll)[0])

        return jax.jit(jax.grad(loss)).lower(draw(0, 64, 1024)).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(recompute(function)) < 0.5 * temporaries(function)
