"""Tests the verdict on settings: paired t intervals like SciPy's, and the share of winners among equal settings."""

import numpy as np
import pytest
from scipy import stats

from pretrainax.config.choice import import_built_in
from pretrainax.reporting.paired import mean_interval, rank

import_built_in()  # declares the metrics


def ranked(values, metric="loss"):
    """Ranks settings a, b, …, given an array [seeds, settings]."""
    values = np.asarray(values, float)
    labels = [chr(97 + i) for i in range(values.shape[1])]
    return rank(metric, labels, [dict(enumerate(column)) for column in values.T])


@pytest.mark.parametrize("noise", ["normal", "heavy", "rounded"])
def test_equal_settings_have_a_best_in_at_most_5_percent_of_200_grids(noise):
    """Tests grids of 2 to 6 seeds and 2 to 8 settings. Each seed shifts all settings, as a common data order does."""
    rng, named = np.random.RandomState(0), 0
    for _ in range(200):
        size = rng.randint(2, 7), rng.randint(2, 9)
        values = rng.standard_t(2, size=size) if noise == "heavy" else rng.normal(size=size)
        values = values + rng.normal(size=(size[0], 1))
        named += ranked(np.round(values, 1) if noise == "rounded" else values).best is not None
    assert named <= 10


@pytest.mark.parametrize("seeds", range(2, 7))
def test_two_equal_settings_have_a_best_in_5_percent_of_grids(seeds):
    """Tests the worst case, two settings: 5 % of 400 are 20 grids, and 35 is the 99.9 % quantile of the binomial."""
    rng = np.random.RandomState(seeds)
    assert sum(ranked(rng.normal(size=(seeds, 2))).best is not None for _ in range(400)) <= 35


def test_a_difference_of_two_settings_is_a_paired_t_test():
    values = np.array([[1.0, 1.3], [2.0, 2.2], [3.0, 3.4], [2.5, 2.9]])
    difference = ranked(values).differences[1]
    interval = stats.ttest_rel(values[:, 1], values[:, 0]).confidence_interval(0.95)
    assert difference.mean - difference.half_width == pytest.approx(interval.low)
    assert difference.mean + difference.half_width == pytest.approx(interval.high)


def test_intervals_of_several_settings_reject_what_holm_rejects():
    rng, checked = np.random.RandomState(3), set()
    for _ in range(200):
        values = rng.normal(size=(5, 4)) + [0, 1, 2, 3]
        found = ranked(values)
        others = [i for i in range(4) if i != found.leader]
        p = np.array([stats.ttest_rel(values[:, i], values[:, found.leader]).pvalue for i in others])
        order, rejected = np.argsort(p), [False] * 3
        for position, i in enumerate(order):
            if p[i] > 0.05 / (3 - position):
                break
            rejected[i] = True
        assert [found.differences[i].is_distinguishable for i in others] == rejected
        checked.add(sum(rejected))
    assert checked == {0, 1, 2, 3}


def test_an_interval_of_a_mean_is_a_t_interval():
    values = [1.0, 2.0, 4.0]
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    mean, half_width = mean_interval(values)
    assert (mean - half_width, mean + half_width) == pytest.approx((low, high))


@pytest.mark.parametrize(
    "values, text",
    [
        (
            [[1, 2]],
            "no best loss: a and b share one seed, a verdict takes at least two; the smallest visible difference, in "
            "standard deviations over seeds, is 2.5 with 3 seeds, and 1.2 with 5 seeds",
        ),
        ([[1, 1.1], [2, 2.1]], "no best loss: a and b differ equally for each seed (+0.1000 over 2 seeds)"),
        ([[1, 1.2], [2, 1.9]], "no best loss: a and b are not distinguishable ("),
        ([[1, 3], [1.1, 3.2], [1.3, 3.3]], "best loss: a, 1.1333 ± 0.3795; next: b, +2.0333 ± 0.1434"),
    ],
)
def test_the_verdict_is_one_line(values, text):
    assert ranked(values).text.startswith(text)


def test_the_seeds_that_a_difference_takes_are_those_of_its_t_test():
    found = ranked([[0, 1], [0, 3], [0, -1]])  # The mean is 1, and the standard deviation is 2.
    assert found.text.endswith("a difference of this size takes about 18 seeds")
    assert stats.t.ppf(0.975, 17) * 2 / 18**0.5 < 1 < stats.t.ppf(0.975, 16) * 2 / 17**0.5


def test_a_difference_of_several_settings_takes_more_seeds_than_it_has():
    """Tests three comparisons: with the level of a single comparison, the verdict on 5 seeds asked for 5 seeds."""
    differences = np.array([0.4, 1.0, 1.6, 0.1, 1.9])  # p = 0.043, and there are three comparisons.
    values = np.stack([np.zeros(5), differences, differences + 1e-3, differences + 2e-3], axis=1)
    assert stats.ttest_1samp(differences, 0).pvalue == pytest.approx(0.043, abs=1e-3)
    found, ratio = ranked(values), differences.mean() / differences.std(ddof=1)
    assert found.text.endswith("a difference of this size takes about 7 seeds")
    quantiles = [stats.t.ppf(1 - 0.05 / 3 / 2, n - 1) / n**0.5 for n in (6, 7)]
    assert quantiles[1] < ratio < quantiles[0]


def test_seeds_that_only_one_setting_has_are_not_paired():
    found = rank("loss", ["a", "b"], [{0: 1.0, 1: 1.1}, {1: 2.0, 2: 2.5}])
    assert found.differences[1].seeds == 1 and found.best is None
