"""The loss over the vocabulary with 8-bit operands, compared with float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.layers import eight_bit
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.heads.vocabulary_loss import loss_sums

FORMATS = sorted(eight_bit.FORMATS)
ROWS, LENGTH, WIDTH, VOCAB = 2, 128, 32, 1000
# Relative error of a gradient, as a norm. Each operand of "fp8" is off by at most 2^-4 and, for the gradient of logits,
# 2^-3, so about 0.03 and 0.06 as a root mean square. For "int8" the variance added to a token's probabilities p is at
# most 1 / 127 of their sum, so the error is about 127^-0.5 = 0.09.
LARGEST_ERROR = {"fp8": 0.07, "int8": 0.11}


def example(mean=-20):
    """Returns features, matrix and bias, targets drawn from the softmax, and weights of which a third are 0.

    By default, the mean of the logits is far from 0, which checks that the matrix is centered before it is rounded.
    """
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH)), jnp.float32)
    matrix = jnp.asarray((rng.normal(size=(WIDTH, VOCAB)) + mean) * WIDTH**-0.5, jnp.float32)
    bias = jnp.asarray(rng.normal(size=VOCAB), jnp.float32)
    targets = jax.random.categorical(jax.random.key(1), features @ matrix + bias[None, None])
    return (features, matrix, bias), targets, jnp.asarray(rng.random((ROWS, LENGTH)) > 1 / 3, jnp.float32)


def loss_and_gradients(arrays, targets, weights, products, **options):
    def loss(arrays):
        sums = loss_sums(LanguageModelOutput(*arrays), targets, weights, products=products, chunk=64, **options)
        return sums["objective"][0] / weights.sum()

    return jax.jit(jax.value_and_grad(loss))(arrays)


def errors(products, arrays, targets, weights, **options):
    loss, gradients = loss_and_gradients(arrays, targets, weights, products, **options)
    expected, expected_gradients = loss_and_gradients(arrays, targets, weights, "", **options)
    pairs = zip(gradients, expected_gradients, strict=True)
    return abs(loss - expected), [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs]


@pytest.mark.parametrize("products", FORMATS)
@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-3, "label_smoothing": 0.1}], ids=["plain", "smoothed"])
def test_the_loss_and_its_gradients_are_those_of_float32_up_to_rounding(products, options):
    # A z-loss keeps the mean near 0, so the matrix is not centered.
    loss_error, gradient_errors = errors(products, *example(0 if options else -20), **options)
    assert loss_error < 0.01  # nats: the rounding of logits, averaged over 170 targets
    assert max(gradient_errors) < LARGEST_ERROR[products], gradient_errors


@pytest.mark.parametrize("products", FORMATS)
def test_tokens_without_weight_do_not_change_the_scales(products):
    """Their gradient is 0, and a scale of 1 would round the other tokens to 0."""
    arrays, targets, weights = example()
    _, one_token = errors(products, arrays, targets, weights.at[:, 1:].set(0.0))
    # A single token's errors do not average: 2^-3 for "fp8"; a target's probabilities below 1 / 127 for "int8"
    assert max(one_token) < 2 * LARGEST_ERROR[products], one_token


def test_probabilities_of_a_large_vocabulary_do_not_underflow(monkeypatch):
    """With equal logits, each probability is 1 / V, which float8_e4m3fn rounds to 0: half its smallest value is larger.

    The gradient of the matrix for tokens that are no targets must not vanish.
    """
    vocabulary = 2**19
    arrays = jnp.ones((1, 8, 4)), jnp.zeros((4, vocabulary)), None
    targets, weights = jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8))

    def others():
        return loss_and_gradients(arrays, targets, weights, "fp8")[1][1][:, 1:]

    np.testing.assert_allclose(others(), 1 / vocabulary, rtol=2**-3)  # float8_e5m2's rounding
    monkeypatch.setitem(eight_bit.LOGIT_GRADIENTS, "fp8", eight_bit.FORMATS["fp8"])  # the fault that this test finds
    assert not others().any()


@pytest.mark.parametrize("products", FORMATS)
@pytest.mark.parametrize("where", range(3))
def test_a_value_that_is_not_finite_makes_gradients_that_are_not_finite(products, where):
    arrays, targets, weights = example()
    arrays = [a.at[(0,) * a.ndim].set(jnp.nan) if i == where else a for i, a in enumerate(arrays)]
    _, gradients = loss_and_gradients(arrays, targets, weights.at[0, 0].set(1.0), products)
    assert not any(jnp.isfinite(gradient).all() for gradient in gradients)
