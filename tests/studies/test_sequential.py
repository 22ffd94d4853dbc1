"""Tests that interim looks keep the probability of a false verdict."""

import numpy as np
import pytest

from pretrainax.files.errors import UserError
from pretrainax.reporting.significance import t_quantile
from pretrainax.studies.sequential import look_levels, look_seeds, simulated_statistics


def errors(counts, levels) -> float:
    """Returns the share of 100,000 studies of equal arms in which at least one look finds a difference."""
    limits = [t_quantile(n - 1, level) for n, level in zip(counts, levels, strict=True)]
    return float((simulated_statistics(counts, 100_000, seed=1) > np.array(limits)).any(axis=1).mean())


@pytest.mark.parametrize("alpha", [0.05, 0.01])
@pytest.mark.parametrize("counts", [(3, 5), (2, 4, 6), (4, 7, 10), (2, 4, 6, 8, 10), (6, 12, 18, 24, 30)])
def test_some_look_errs_in_5_percent_of_studies(counts, alpha):
    levels = look_levels(counts, alpha)
    found = errors(counts, levels)
    print(f"looks at {counts} seeds, levels {np.round(levels, 4).tolist()}: {found:.2%} of equal arms differ")
    # The tolerance is four standard errors of 100,000 studies, and of the 400,000 studies that determine the levels.
    assert found == pytest.approx(alpha, abs=4 * np.sqrt(alpha * (1 - alpha) * (1e-5 + 2.5e-6)))


def test_the_full_level_at_each_look_would_err_more_often():
    assert errors((2, 4, 6, 8, 10), [0.05] * 5) > 0.1


def test_the_statistic_of_a_look_has_a_t_distribution():
    counts = (2, 3, 10)
    for level in (0.01, 0.05, 0.5):
        limits = np.array([t_quantile(n - 1, level) for n in counts])
        found = (simulated_statistics(counts, 100_000, seed=2) > limits).mean(axis=0)
        # The tolerance is four standard errors.
        assert found == pytest.approx(level, abs=4 * np.sqrt(level * (1 - level) / 1e5))


def test_levels_rise_and_repeat():
    levels = look_levels((4, 7, 10))
    assert levels[0] < levels[1] < levels[2] < 0.05
    look_levels.cache_clear()
    assert look_levels((4, 7, 10)) == levels


def test_one_look_has_the_full_level():
    assert look_levels((5,)) == (0.05,)


def test_looks_are_evenly_spaced():
    assert look_seeds(10, 3) == (4, 7, 10) and look_seeds(5, 1) == (5,)


def test_a_look_at_one_seed_is_refused():
    with pytest.raises(UserError, match=r"stop.looks is 5; it must be at most 4 for 5 seeds"):
        look_seeds(5, 5)
