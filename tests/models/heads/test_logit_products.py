"""Compares the loss over the vocabulary with 8-bit operands with float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.layers import eight_bit
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.heads.vocabulary_loss import loss_sums

FORMATS = sorted(eight_bit.FORMATS)
ROWS, LENGTH, WIDTH, VOCAB = 2, 128, 32, 1000
# These are the relative errors of a gradient's norm. "fp8" changes each operand by at most 2^-4, and the gradient of
# the logits by at most 2^-3, so the root mean square is about 0.03 and 0.06. "int8" adds a variance to a token's
# probabilities p of at most 1 / 127 of their sum, so the error is about 127^-0.5 = 0.09.
LARGEST_ERROR = {"fp8": 0.07, "int8": 0.11}


def example(mean=-20):
    """Returns features, matrix and bias, targets drawn from the softmax, and weights, a third of which are 0.

    By default, the mean of the logits is far from 0. This checks that the matrix is centered before it is rounded.
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
    assert loss_error < 0.01  # in nats: rounding errors of logits, averaged over 170 targets
    assert max(gradient_errors) < LARGEST_ERROR[products], gradient_errors


@pytest.mark.parametrize("products", FORMATS)
def test_tokens_without_weight_do_not_change_the_scales(products):
    """Tests that the gradients of these tokens are 0; with a scale of 1, the other tokens would round to 0."""
    arrays, targets, weights = example()
    _, one_token = errors(products, arrays, targets, weights.at[:, 1:].set(0.0))
    # Errors of a single token do not average. For "fp8", they are 2^-3. For "int8", they are a target's probability
    # below 1 / 127.
    assert max(one_token) < 2 * LARGEST_ERROR[products], one_token


def test_probabilities_of_a_large_vocabulary_do_not_underflow(monkeypatch):
    """Tests that the gradient of the matrix does not vanish for tokens that are no targets.

    With equal logits, each probability is 1 / V. float8_e4m3fn rounds this to 0, because half of its smallest value is
    larger.
    """
    vocabulary = 2**19
    arrays = jnp.ones((1, 8, 4)), jnp.zeros((4, vocabulary)), None
    targets, weights = jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8))

    def others():
        return loss_and_gradients(arrays, targets, weights, "fp8")[1][1][:, 1:]

    np.testing.assert_allclose(others(), 1 / vocabulary, rtol=2**-3)  # The tolerance is the rounding of float8_e5m2.
    # This is the fault that the test must find.
    monkeypatch.setitem(eight_bit.LOGIT_GRADIENTS, "fp8", eight_bit.FORMATS["fp8"])
    assert not others().any()


@pytest.mark.parametrize("products", FORMATS)
@pytest.mark.parametrize("where", range(3))
def test_a_value_that_is_not_finite_makes_gradients_that_are_not_finite(products, where):
    arrays, targets, weights = example()
    arrays = [a.at[(0,) * a.ndim].set(jnp.nan) if i == where else a for i, a in enumerate(arrays)]
    _, gradients = loss_and_gradients(arrays, targets, weights.at[0, 0].set(1.0), products)
    assert not any(jnp.isfinite(gradient).all() for gradient in gradients)
