"""Measures how often 95 % intervals contain the true value, for simulated documents and shares."""

import numpy as np
import pytest
from scipy import signal, stats

from pretrainax.scoring.results import Estimate, jackknife, paired_share, ratio, share, wilson

TRUE, PIECE, DRAWS = 3.0, 16, 600


def pieces(documents: int, effect: float, rng: np.random.Generator, shortest: int) -> tuple[np.ndarray, ...]:
    """Draws sums, counts and document numbers of pieces of text whose tokens have a mean of TRUE nats.

    The lengths are log-normal, the losses of tokens skewed and correlated, and the means of documents differ by
    `effect`.
    """
    parts = []
    for document in range(documents):
        length = max(int(rng.lognormal(5.5, 1.3)), shortest)
        noise = rng.gamma(0.5, size=length + 50) - 0.5
        losses = TRUE + effect * rng.normal() + 2 * signal.lfilter([0.4], [1, -0.6], noise)[50:]
        starts = np.arange(0, length, PIECE)
        counts = np.diff(np.append(starts, length))
        parts.append((np.add.reduceat(losses, starts), counts, np.full(len(starts), document)))
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def coverage(documents: int, effect: float, shortest: int = 5) -> tuple[float, set[str]]:
    """Returns the share of intervals that contain TRUE, and the units from which they are computed."""
    rng, hits, names = np.random.default_rng(documents), 0, set()
    for _ in range(DRAWS):
        found = ratio(*pieces(documents, effect, rng, shortest))
        low, high = found.interval
        hits, names = hits + (low <= TRUE <= high), names | {found.clusters}
    return hits / DRAWS, names


@pytest.mark.first(1)
@pytest.mark.parametrize("documents", [3, 10, 100])
def test_intervals_over_documents_that_differ_contain_the_mean_of_all_documents(documents):
    found, names = coverage(documents, effect=0.3)
    assert 0.92 < found < 0.985 and names == {
        "documents"
    }  # 600 draws have an error of ± 0.018. With few documents of unequal length, the coverage is above 0.95.


def test_the_interval_of_one_long_document_contains_the_mean_of_its_text():
    found, names = coverage(1, effect=0.0, shortest=1000)
    assert 0.92 < found < 0.98 and names == {"blocks within documents"}


@pytest.mark.parametrize(("p", "low", "high"), [(0.0, 1.0, 1.0), (0.05, 0.92, 0.98), (0.5, 0.92, 0.98)])
def test_intervals_of_shares_of_20_trials_contain_the_true_share(p, low, high):
    """Sums the exact coverage over all outcomes; with p = 0 there is one outcome."""
    trials, covered = 20, 0.0
    for successes in range(trials + 1):
        bounds = share(np.arange(trials) < successes).interval
        covered += stats.binom.pmf(successes, trials, p) * (bounds[0] <= p <= bounds[1])
    assert low <= covered <= high + 1e-9


@pytest.mark.parametrize("successes", [0, 1, 7, 20])
def test_the_interval_of_a_share_is_scipys(successes):
    expected = stats.binomtest(successes, 20).proportion_ci(method="wilson")
    found = share(np.arange(20) < successes)
    assert found.interval == pytest.approx(tuple(expected), abs=1e-6)  # The quantile has seven digits.
    assert (found.standard_error is None) == (successes in (0, 20))


@pytest.mark.parametrize("chances", [(0.1, 0.1), (0.3, 0.1), (0.25, 0.25)])
def test_intervals_of_paired_shares_of_20_trials_contain_the_true_difference(chances):
    """Sums the exact coverage over all numbers of trials in which only one of the two models is right."""
    covered, trials, true = 0.0, 20, chances[0] - chances[1]
    for a in range(trials + 1):
        for b in range(trials + 1 - a):
            low, high = paired_share([1] * a + [-1] * b + [0] * (trials - a - b)).interval
            chance = stats.multinomial.pmf([a, b, trials - a - b], trials, [*chances, 1 - sum(chances)])
            covered += chance * (low <= true <= high)
    assert 0.92 < covered < 0.985  # Above 0.98 if few trials differ.


def test_the_interval_of_equal_documents_is_the_t_interval_of_their_mean():
    values = np.random.default_rng(0).normal(size=7)
    expected = stats.t.interval(0.95, 6, values.mean(), stats.sem(values))
    assert ratio(values, np.ones(7)).interval == pytest.approx(expected)
    assert ratio(values, np.ones(7)).p_value == pytest.approx(stats.ttest_1samp(values, 0).pvalue)


def test_a_jackknife_of_a_mean_has_the_error_of_the_mean():
    values = np.random.default_rng(1).normal(size=12)
    without = [np.delete(values, i).mean() for i in range(12)]
    found = jackknife(values.mean(), without, 12, is_share=False)
    assert found.standard_error == pytest.approx(stats.sem(values))
    assert found.interval == pytest.approx(stats.t.interval(0.95, 11, values.mean(), stats.sem(values)))


@pytest.mark.parametrize(("records", "tokens"), [(2, 20), (3, 20), (5, 20), (20, 20), (5, 1), (20, 1), (200, 1)])
def test_intervals_of_shares_of_few_records_contain_the_true_share(records, tokens):
    """Without the degrees of freedom, intervals of 2, 3 and 5 records contain 79, 82 and 88 % of the true shares."""
    rng, found, widths = np.random.default_rng(0), [], []
    for _ in range(1000):
        right = rng.binomial(tokens, rng.beta(2, 2, records)) if tokens > 1 else rng.random(records) < 0.5
        groups = np.arange(records) % min(records, 20)
        without = [right[groups != i].mean() / tokens for i in range(groups.max() + 1)]
        low, high = jackknife(right.mean() / tokens, without, records, is_share=True).interval
        found.append(low <= 0.5 <= high)
        widths.append(high - low)
    assert np.mean(found) > 0.93  # Wilson's intervals of 5 and 20 trials contain 94 and 96 %
    if tokens == 1 and records == 20:  # not wider than necessary
        assert np.mean(widths) == pytest.approx(np.mean([np.ptp(wilson(k / 20, 20)) for k in (9, 10, 11)]), rel=0.05)


def test_a_jackknife_of_a_share_without_errors_has_wilsons_interval():
    assert jackknife(1.0, [1.0] * 10, 10, is_share=True).interval == wilson(1.0, 10)
    assert jackknife(1.0, [1.0] * 10, 10, is_share=False) == Estimate(1.0, None)


def test_the_interval_of_a_perplexity_is_that_of_its_logarithm():
    found = ratio([2.0, 3.0, 2.5], [1, 1, 1])
    low, high = found.interval
    assert found.exp().interval == pytest.approx((np.exp(low), np.exp(high)))
    assert found.times(-2.0).interval == (-2 * high, -2 * low)
