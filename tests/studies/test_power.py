"""The power that a study states before it starts."""

import numpy as np
import pytest
from scipy import stats

from pretrainax.studies.contrasts import Noise
from pretrainax.studies.power import equivalence_power, power, seeds_needed, smallest_effect

ONE = Noise(1.0)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10, 50])
@pytest.mark.parametrize("effect", [0.01, 0.5, 1, 2])
def test_the_power_is_that_of_the_noncentral_t_distribution(effect, seeds):
    expected = stats.nct.sf(stats.t.ppf(0.975, seeds - 1), seeds - 1, effect * np.sqrt(seeds))
    # The tolerance is the accuracy of the integral.
    assert power(effect, seeds, ONE) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("seeds", [5, 10])
@pytest.mark.parametrize("margin", [0.5, 1, 2])
def test_the_power_of_equivalence_is_that_of_simulated_studies(margin, seeds):
    table = np.random.default_rng(0).normal(size=(40_000, seeds))
    error = table.std(axis=1, ddof=1) / np.sqrt(seeds)
    found = np.mean(np.abs(table.mean(axis=1)) + stats.t.ppf(0.95, seeds - 1) * error < margin)
    # The tolerance is four standard errors of 40,000 studies.
    assert equivalence_power(margin, seeds, ONE) == pytest.approx(found, abs=0.01)


def test_a_difference_of_the_margin_is_called_equivalent_in_at_most_5_percent():
    for seeds in (3, 5, 10, 100):
        # The tolerance is the accuracy of the integral.
        assert equivalence_power(1.0, seeds, ONE, effect=1.0) <= 0.05 + 1e-6
    assert equivalence_power(1.0, 1000, ONE, effect=1.0) == pytest.approx(0.05, abs=1e-4)


def test_the_smallest_effect_has_a_power_of_80_percent():
    for noise in (ONE, Noise(0.01, 0.004, 50.0)):
        # The tolerance is the accuracy of the bisection.
        assert power(smallest_effect(5, noise), 5, noise) == pytest.approx(0.8, abs=1e-5)
    assert smallest_effect(5, ONE) == pytest.approx(1.682, abs=1e-3)  # R: power.t.test(5, sd=1, power=.8, type="one")


def test_the_number_of_seeds_is_the_smallest():
    needed = seeds_needed(lambda n: power(1.0, n, ONE))
    assert needed == 10 and power(1.0, 9, ONE) < 0.8 <= power(1.0, 10, ONE)


def test_more_than_1000_seeds_are_not_proposed():
    assert seeds_needed(lambda n: power(0.01, n, ONE)) is None


def test_seeds_do_not_replace_records():
    assert seeds_needed(lambda n: power(0.5, n, Noise(1.0, 0.3, 100.0))) is None
    assert seeds_needed(lambda n: power(0.5, n, Noise(1.0, 0.03, 100.0))) == 35


@pytest.mark.parametrize("effect", [50.0, 1e6])
def test_large_effects_are_always_found(effect):
    assert power(effect, 5, ONE) == pytest.approx(1)
