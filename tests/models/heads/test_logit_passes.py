"""Compares logit statistics computed in one pass, as on an accelerator, with separate passes and with float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.models.heads import logit_passes
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.heads.vocabulary_loss import loss_sums

TOKENS, VOCAB = 32, 50304
# A CPU adds 50,304 float32 numbers sequentially; a GPU adds them in a tree. Each addition loses at most half a unit in
# the last place of the sum, so the relative error is at most 50,304 · 2^-25 = 1.5e-3. A tenth of this bound suffices,
# because few of the numbers are so small.
SUMS = 1.5e-4


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(logit_passes, "in_one_pass", lambda: True)


def example(dtype):
    """Returns products [1, M, V] of a few units, a bias, and targets, some of which have the largest logit."""
    rng = np.random.default_rng(0)
    products = jnp.asarray(3 * rng.normal(size=(1, TOKENS, VOCAB)), dtype)
    bias = jnp.asarray(rng.normal(size=VOCAB), jnp.float32)
    best = (products.astype(jnp.float32) + bias[None, None]).argmax(-1)
    return products, bias, jnp.where(jnp.arange(TOKENS)[None] % 3 == 0, best, rng.integers(0, VOCAB, (1, TOKENS)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("has_bias, cap, with_mean", [(False, None, False), (True, None, True), (True, 5.0, True)])
def test_one_pass_reads_what_float64_has(accelerator, dtype, has_bias, cap, with_mean):
    products, bias, targets = example(dtype)
    bias = bias if has_bias else None
    found = jax.jit(lambda *args: logit_passes.logit_stats(*args, cap=cap, with_mean=with_mean))(
        products, bias, targets
    )
    logits = np.asarray(products, np.float64) + (0 if bias is None else np.asarray(bias, np.float64))
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    np.testing.assert_allclose(found.largest, logits.max(-1), rtol=1e-6)  # This is a single float32 number.
    np.testing.assert_allclose(found.normaliser, np.exp(logits - logits.max(-1, keepdims=True)).sum(-1), rtol=SUMS)
    of_target = np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(found.target, of_target, rtol=1e-6, atol=1e-6)  # This is a single number, or 0.
    if with_mean:  # The mean is near 0. It is computed from the distances to the largest logit, which are 5 to 15.
        np.testing.assert_allclose(found.mean, logits.mean(-1), atol=15 * SUMS)
    else:
        assert found.mean is None
    if cap is None:  # A cap makes large logits equal.
        assert np.array_equal(found.is_correct, logits.argmax(-1) == targets)


@pytest.mark.parametrize("target, is_right", [(7, True), (60, False), (3, False)])
def test_of_equal_logits_the_first_is_the_largest(accelerator, target, is_right):
    products = jnp.zeros((1, 1, 97), jnp.bfloat16).at[0, 0, jnp.array([7, 60, 96])].set(2.0)
    assert (
        bool(logit_passes.logit_stats(products, None, jnp.array([[target]]), None, False).is_correct[0, 0]) is is_right
    )


def losses(features, matrix, targets, dtype):
    """Returns the mean loss of 256 tokens and its gradients, from the code and from float64 with the same features."""

    def mean(features, matrix):
        sums = loss_sums(LanguageModelOutput(features, matrix), targets, jnp.ones(targets.shape), chunk=64)
        return sums["objective"][0] / sums["objective"][1]

    value, gradients = jax.jit(jax.value_and_grad(mean, (0, 1)))(features.astype(dtype), matrix)
    x, w = np.asarray(features.astype(dtype), np.float64).reshape(-1, matrix.shape[0]), np.asarray(matrix, np.float64)
    logits = x @ w
    logits -= logits.max(-1, keepdims=True)
    exponentials = np.exp(logits)
    hits = np.arange(len(x)), np.asarray(targets).reshape(-1)
    slopes = exponentials / exponentials.sum(-1, keepdims=True)
    exact = np.log(exponentials.sum(-1)) - logits[hits]
    slopes[hits] -= 1
    expected = (slopes @ w.T / len(x)).reshape(features.shape), x.T @ slopes / len(x)
    return (float(value), gradients), (exact.mean(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0.0, 100.0])
def test_the_error_of_bfloat16_logits_is_that_of_their_rounding(accelerator, shared):
    """Tests logits near 0, and logits as far from 0 as the logits of GPT-2's released weights (-30 to -130)."""
    rng = np.random.default_rng(1)
    batch, length, width = 4, 64, 64
    features = jnp.asarray(rng.normal(size=(batch, length, width)), jnp.float32).at[..., 0].set(1.0)
    # The logits are 3 ± 3.
    matrix = jnp.asarray(rng.normal(size=(width, VOCAB)) * 3 / 8, jnp.float32).at[0].add(-shared)
    targets = jnp.asarray(rng.integers(0, VOCAB, (batch, length)), jnp.int32)
    (value, gradients), (exact, expected) = losses(features, matrix, targets, jnp.bfloat16)
    # bfloat16 rounds a logit between 2 and 4 to steps of 2^-6, which is an error of 2^-6 / sqrt(12) = 0.0045. The
    # entries of the matrix add an error of the same size: 0.006 together. The error of the mean of 256 tokens is a 16th
    # of this. The tolerance is four times as large:
    assert abs(value - exact) < 4 * 0.006 / 16
    for got, wanted in zip(gradients, expected, strict=True):
        # The rounding of logits changes each probability by 0.6 %. The gradient is rounded once more,
        # by 2^-9 / sqrt(3).
        difference = np.linalg.norm(np.asarray(got, np.float64) - wanted)
        assert difference < 0.007 * np.linalg.norm(wanted)


def test_float32_logits_lose_nothing(accelerator):
    rng = np.random.default_rng(2)
    features = jnp.asarray(rng.normal(size=(4, 64, 64)), jnp.float32)
    matrix = jnp.asarray(rng.normal(size=(64, VOCAB)) * 3 / 8, jnp.float32)
    targets = jnp.asarray(rng.integers(0, VOCAB, (4, 64)), jnp.int32)
    (value, gradients), (exact, expected) = losses(features, matrix, targets, jnp.float32)
    assert value == pytest.approx(exact, abs=SUMS)  # This is the logarithm of a sum.
    for got, wanted in zip(gradients, expected, strict=True):
        assert np.linalg.norm(np.asarray(got, np.float64) - wanted) < SUMS * np.linalg.norm(wanted)


@pytest.mark.first(1)
@pytest.mark.parametrize("cap", [None, 5.0])
def test_derivatives_of_one_pass_are_those_of_reading_in_turn(accelerator, cap):
    products, bias, targets = example(jnp.float32)
    direction = jnp.asarray(np.random.default_rng(3).normal(size=products.shape), jnp.float32)

    def loss(form, products):
        read = form(cap, False, products, bias, targets)
        return jnp.log(read.normaliser) + read.largest - read.target

    forms = logit_passes._stats_in_one_pass, logit_passes._stats_in_separate_passes
    got, expected = (jax.jvp(functools.partial(loss, form), (products,), (direction,)) for form in forms)
    np.testing.assert_allclose(got[0], expected[0], rtol=SUMS)
    # The two sums of 50,304 numbers have different orders.
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5, atol=1e-4)
