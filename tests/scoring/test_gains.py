"""Tests the difference of a metric between two models on the same records, and its standard error."""

import numpy as np
import pytest
from scipy import stats

from pretrainax.runs.learned import Gain, warning_of
from pretrainax.scoring.gains import resampled_gain
from pretrainax.scoring.results import ratio_difference

RNG = np.random.default_rng(0)
ONES = np.ones(400)


def test_the_error_of_a_difference_of_means_is_that_of_a_paired_t_test():
    a, b = RNG.normal(size=(2, 400))
    value, error, *_ = ratio_difference((a, ONES), (b, ONES), np.arange(400))
    assert value == pytest.approx(a.mean() - b.mean())
    assert value / error == pytest.approx(stats.ttest_rel(a, b).statistic)


def test_records_of_a_cluster_count_once():
    a = RNG.normal(size=100)
    _, alone, *_ = ratio_difference((a, ONES[:100]), (0 * a, ONES[:100]), np.arange(100))
    four_times = np.repeat(a, 4)
    _, repeated, *_ = ratio_difference((four_times, ONES), (0 * four_times, ONES), np.repeat(np.arange(100), 4))
    assert repeated == pytest.approx(alone)


def test_the_error_of_a_difference_of_f1_is_its_spread_over_samples():
    """Draws 2,000 samples of 400 sentences with dependent numbers of spans; their spread has an error of 1.6 %."""

    def sums(rng):
        labeled = rng.poisson(3, (400, 1))
        correct = rng.binomial(labeled, (0.8, 0.6))
        return correct, labeled + rng.binomial(labeled, (0.9, 0.9))

    def gain(rng):
        correct, total = sums(rng)
        value, error, *_ = ratio_difference(
            *((2.0 * correct[:, i], 1.0 * total[:, i]) for i in range(2)), np.arange(400)
        )
        return value, error

    values, errors = np.array([gain(np.random.default_rng(i)) for i in range(2000)]).T
    assert errors.mean() == pytest.approx(values.std(), rel=0.06)  # The tolerance is 4 of these errors.


def test_resampling_and_the_formula_agree_for_a_mean():
    pair = RNG.normal(size=(2, 400))
    clusters = RNG.permutation(np.repeat(np.arange(80), 5))
    value, error, *_ = ratio_difference((pair[0], ONES), (pair[1], ONES), clusters)
    resampled = resampled_gain(lambda x, records: x[records].mean(), (pair[0], pair[1]), clusters)
    assert resampled.value == pytest.approx(value)
    assert resampled.standard_error == pytest.approx(error, rel=0.2)  # 4 times the error of 200 resamples, 5 %


def test_a_single_cluster_has_no_error():
    assert ratio_difference((ONES, ONES), (ONES, ONES), np.zeros(400, int)).standard_error is None
    assert resampled_gain(lambda x, i: x[i].mean(), (ONES, ONES), np.zeros(400, int)).standard_error is None


def test_a_model_that_equals_its_baseline_is_warned_of_in_95_percent_of_200_draws():
    """Both predict 300 records with the same accuracy, independently."""
    warned = 0
    for seed in range(200):
        right = np.random.default_rng(seed).random((2, 300)) < 0.7
        gain = ratio_difference(*((x.astype(float), np.ones(300)) for x in right), np.arange(300))
        warned += warning_of([Gain("accuracy", "label frequencies", gain)]) is not None
    assert warned >= 190


@pytest.mark.parametrize("records", [2, 3, 5, 20])
def test_a_model_that_equals_its_baseline_rarely_wins_on_few_records(records):
    """2.5 % of gains are learned; if the limit were 2 standard errors, 15 % of gains over two records would be."""
    rng, ones = np.random.default_rng(0), np.ones(records)
    pairs = (rng.normal(size=(2, records)) for _ in range(1000))
    gains = [ratio_difference((a, ones), (b, ones), np.arange(records)) for a, b in pairs]
    assert np.mean([Gain("loss", "mean", gain).is_learned for gain in gains]) < 0.025 + 3 * 0.005  # standard errors


def test_a_resampled_gain_has_the_t_interval_of_its_clusters():
    """Of 3 records: without the factor, the spread of resamples is 18 % smaller than the standard error."""
    a, b = np.array([1.0, 2.0, 4.0]), np.array([0.5, 1.0, 1.5])
    found = resampled_gain(lambda x, records: x[records].mean(), (a, b), np.arange(3))
    assert found.standard_error == pytest.approx(stats.sem(a - b), rel=0.15)  # 200 resamples: 5 %
    assert found.interval == pytest.approx(stats.t.interval(0.95, 2, (a - b).mean(), found.standard_error))


@pytest.mark.parametrize(("records", "is_learned"), [(2, False), (5, False), (6, True), (100, True)])
def test_a_model_that_is_right_on_every_record_wins_only_on_six_or_more(records, is_learned):
    """The p-value of the sign test is 2 / 2^n, and there is no interval of width 0."""
    right, ones = np.ones(records), np.ones(records)
    for gain in (
        ratio_difference((0.1 * right, ones), (0.0 * right, ones), np.arange(records)),
        resampled_gain(lambda x, i: float(x[i].mean()), (right, 0.0 * right), np.arange(records)),
    ):
        assert Gain("accuracy", "label frequencies", gain).is_learned is is_learned
        assert gain.standard_error == 0 and gain.interval is None
