"""Compares the linear-chain CRF with the sum over all tag sequences and the best one, each scored separately."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.models.heads import chain

W, L, SIZES = 4, 3, (4, 2, 1, 0)  # SIZES: the number of words of each row
RNG = np.random.RandomState(0)
EMISSIONS = RNG.standard_normal((len(SIZES), W, L)).astype(np.float32)
BETWEEN, START, END = (RNG.standard_normal(shape).astype(np.float32) for shape in ((L, L), (L,), (L,)))
REAL = np.arange(W)[None] < np.array(SIZES)[:, None]
TRANSITIONS = chain.Transitions(*map(jnp.asarray, (BETWEEN, START, END)))


def score_by_hand(row, tags):
    if not tags:
        return 0.0
    words = sum(EMISSIONS[row, t, tag] for t, tag in enumerate(tags))
    return START[tags[0]] + words + sum(BETWEEN[a, b] for a, b in itertools.pairwise(tags)) + END[tags[-1]]


def all_tags(row):
    """Returns all possible tag sequences of a row, with their scores."""
    every = list(itertools.product(range(L), repeat=SIZES[row]))
    return every, np.array([score_by_hand(row, tags) for tags in every])


def test_the_partition_is_the_sum_over_all_tags(variant):
    found = variant(chain.log_partition)(EMISSIONS, REAL, TRANSITIONS)
    whole = [np.logaddexp.reduce(all_tags(row)[1]) for row in range(len(SIZES))]
    np.testing.assert_allclose(found, whole, rtol=1e-5)
    assert found[3] == 0.0


def test_the_score_is_that_of_the_tags_alone():
    tags = RNG.randint(0, L, (len(SIZES), W))
    found = chain.score(EMISSIONS, tags, REAL, TRANSITIONS)
    wanted = [score_by_hand(row, tuple(tags[row, :n])) for row, n in enumerate(SIZES)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_marginals_are_the_shares_of_all_tags():
    found = chain.marginals(EMISSIONS, REAL, TRANSITIONS)
    wanted = np.zeros((len(SIZES), W, L))
    for row in range(len(SIZES)):
        every, scores = all_tags(row)
        shares = np.exp(scores - np.logaddexp.reduce(scores))
        for tags, share in zip(every, shares, strict=True):
            for t, tag in enumerate(tags):
                wanted[row, t, tag] += share
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_gradients_of_transitions_are_what_is_expected_of_pairs():
    whole = lambda transitions: chain.log_partition(EMISSIONS, REAL, transitions).sum()  # noqa: E731
    wanted = np.zeros((L, L))
    for row in range(len(SIZES)):
        every, scores = all_tags(row)
        for tags, share in zip(every, np.exp(scores - np.logaddexp.reduce(scores)), strict=True):
            for pair in itertools.pairwise(tags):
                wanted[pair] += share
    np.testing.assert_allclose(jax.grad(whole)(TRANSITIONS).between, wanted, atol=1e-6)


@pytest.mark.parametrize("forbids", (False, True))
def test_the_best_tags_have_the_highest_score(forbids, variant):
    allowed = np.ones((L + 1, L), bool)
    if forbids:
        allowed[[0, 2, L], 1] = False  # Tag 1 may only follow tag 1, so it never occurs.
        allowed[0, 0] = False
    found = variant(chain.best_tags)(EMISSIONS, REAL, TRANSITIONS, jnp.asarray(allowed))
    for row, n in enumerate(SIZES):
        every, scores = all_tags(row)
        fits = [all(allowed[a, b] for a, b in itertools.pairwise((L, *tags))) for tags in every]
        best = every[int(np.argmax(np.where(fits, scores, -np.inf)))]
        assert tuple(found[row].tolist()) == (*best, *[0] * (W - n))


@pytest.mark.slow
def test_padding_changes_nothing():
    """Compares the rows with the same rows in longer padding."""
    padded = np.pad(EMISSIONS, ((0, 0), (0, 3), (0, 0)), constant_values=9.0)
    real = np.pad(REAL, ((0, 0), (0, 3)))
    shorter = chain.log_partition(EMISSIONS, REAL, TRANSITIONS)
    np.testing.assert_array_equal(chain.log_partition(padded, real, TRANSITIONS), shorter)
    best = chain.best_tags(padded, real, TRANSITIONS)
    np.testing.assert_array_equal(best[:, :W], chain.best_tags(EMISSIONS, REAL, TRANSITIONS))
