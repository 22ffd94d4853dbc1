"""Tests the difference of two arms: its direction, its pairs, and the coverage of its interval."""

import numpy as np
import pytest
from scipy import stats

from pretrainax.reporting.significance import t_quantile
from pretrainax.scoring.results import ratio_difference
from pretrainax.studies.contrasts import Noise, compare, noise_of
from pretrainax.studies.outcomes import Outcome
from tests.support.made_studies import made_outcomes, of_records

ONE, OTHER = [1.0, 1.3, 1.1, 1.6, 1.2], [1.2, 1.4, 1.5, 1.7, 1.6]


@pytest.mark.parametrize("larger_is_better", [True, False])
def test_a_positive_difference_means_better(larger_is_better):
    found = compare(made_outcomes(ONE), made_outcomes(OTHER), larger_is_better)
    assert found.estimate.value == pytest.approx(-0.24 if larger_is_better else 0.24)


def test_without_records_the_interval_is_the_paired_t_interval():
    found, expected = compare(made_outcomes(ONE), made_outcomes(OTHER), True), stats.ttest_rel(ONE, OTHER)
    assert found.estimate.interval == pytest.approx(tuple(expected.confidence_interval()))
    assert found.estimate.p_value == pytest.approx(expected.pvalue) and found.estimate.degrees == pytest.approx(4)
    assert found.estimate.clusters == "pretraining seeds" and found.records == 0


def test_seeds_of_one_arm_alone_are_ignored_and_listed():
    one, other = made_outcomes(ONE), made_outcomes(OTHER)
    missing = {seed: other[seed] for seed in (4, 2, 1)} | {9: other[0]}
    found = compare(one, missing, True)
    assert found.seeds == (1, 2, 4) and found.unpaired == (0, 3, 9)
    assert found.differences == pytest.approx((-0.1, -0.4, -0.4))


def test_arms_without_a_common_seed_have_no_difference():
    found = compare({0: [Outcome(1.0)]}, {1: [Outcome(1.0)]}, True)
    assert np.isnan(found.estimate.value) and found.estimate.interval is None and found.seeds == ()


def test_the_value_of_a_pretraining_seed_is_the_mean_over_its_downstream_seeds():
    changes = np.array([0.1, -0.1])
    one = {s: [Outcome(v - 0.1, changes), Outcome(v + 0.1, 3 * changes)] for s, v in enumerate(ONE)}
    other = {s: [Outcome(v, 0 * changes)] for s, v in enumerate(OTHER)}
    mean = {s: [Outcome(v, 2 * changes)] for s, v in enumerate(ONE)}
    found, expected = compare(one, other, True).estimate, compare(mean, other, True).estimate
    assert found.value == pytest.approx(expected.value) and found.interval == pytest.approx(expected.interval)


def test_if_all_seeds_are_equal_the_error_is_that_of_the_records():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 60))
    found = compare(of_records(np.tile(a, (4, 1))), of_records(np.tile(b, (4, 1))), True).estimate
    expected = ratio_difference((a, np.ones(60)), (b, np.ones(60)), np.arange(60))
    assert found.value == pytest.approx(expected.value)
    assert found.standard_error == pytest.approx(expected.standard_error)


def test_an_arm_without_records_leaves_the_seeds():
    rng = np.random.default_rng(0)
    found = compare(of_records(rng.normal(size=(5, 30))), made_outcomes(OTHER), True)
    assert found.records == 0 and found.estimate.degrees == pytest.approx(4)


def test_one_seed_has_no_interval():
    found = compare(made_outcomes(ONE[:1]), made_outcomes(OTHER[:1]), True)
    assert found.estimate.interval is None and found.noise is None


def test_equal_differences_have_no_interval():
    # The differences are equal except for rounding.
    found = compare(made_outcomes([0.1, 0.2, 0.3]), made_outcomes([0.2, 0.3, 0.4]), True)
    assert found.estimate.interval is None


def test_an_accuracy_that_differs_equally_for_both_seeds_still_has_an_error():
    """Tests two seeds that each answer one more record, but different ones: both differences are 1/40."""
    one = np.zeros((2, 40))
    one[0, 3] = one[1, 17] = 1
    found = compare(of_records(one), of_records(np.zeros((2, 40))), True).estimate
    assert found.value == pytest.approx(1 / 40) and found.p_value > 0.05


def test_different_numbers_of_records_are_an_error():
    with pytest.raises(ValueError, match="operands"):
        compare(of_records(np.ones((2, 3))), of_records(np.ones((2, 4))), True)


def simulated(seeds: int, records: int, by_seed: float, by_record: float, by_pair: float) -> tuple[float, Noise]:
    """Returns the share of intervals that contain the true difference, 0, in 2,000 studies."""
    rng, covered = np.random.default_rng([seeds, records]), 0
    for _ in range(8):  # Batches of 250 studies save memory.
        shape, size = (250, seeds, records), np.sqrt(records)
        table = by_seed * rng.standard_normal((250, seeds, 1)) + by_record * size * rng.standard_normal(
            (250, 1, records)
        )
        table = table + by_pair * size * rng.standard_normal(shape) if by_pair else np.broadcast_to(table, shape)
        values = table.mean(axis=2)
        noise = noise_of(values, (table - values[..., None]) / (records - 1), 1.0)
        widths = stats.t.ppf(0.975, noise.degrees(seeds)) * np.sqrt(noise.variance(seeds))
        covered += int((np.abs(values.mean(axis=1)) <= widths).sum())
    return covered / 2000, noise


EFFECTS = {"seeds": (1, 0, 0), "records": (0, 1, 0), "both": (1, 1, 0), "all": (1, 0.5, 0.5)}


@pytest.mark.parametrize("records", [50, 500])
@pytest.mark.parametrize("seeds", [5, 10])
@pytest.mark.parametrize("effects", EFFECTS)
def test_intervals_contain_the_true_difference(effects, seeds, records):
    """Tests the limits 95 % ± 2 points, which are four standard errors of a share of 2,000 studies."""
    covered, _ = simulated(seeds, records, *EFFECTS[effects])
    print(f"{effects} vary, {seeds} seeds, {records} records: {covered:.1%}")
    assert 0.93 <= covered <= 0.97


@pytest.mark.parametrize("seeds", [5, 10])
def test_independent_errors_of_each_seed_and_record_widen_the_interval_little(seeds):
    """Tests a coverage above 95 %.

    The true variance component of the records is 0, so its estimate is too large.
    """
    assert 0.945 <= simulated(seeds, 50, 0, 0, 1)[0] <= 0.98


def test_with_two_seeds_a_record_effect_makes_intervals_slightly_too_narrow():
    covered, _ = simulated(2, 500, 1, 0.3, 0.3)
    assert 0.88 <= covered <= 0.95  # The measured share is 91 %, as the docstring of `Noise.degrees` states.


def test_more_seeds_reduce_the_error_of_seeds_alone():
    noise = Noise(2.0, 0.5, 100.0)
    assert noise.variance(4) == 1.25 and noise.variance(10**9) == pytest.approx(0.25)
    assert Noise(2.0).degrees(7) == pytest.approx(6)
    assert Noise(0.0, 0.5, 30.0).degrees(7) == pytest.approx(30)
    assert t_quantile(noise.degrees(4)) > t_quantile(noise.degrees(40))
