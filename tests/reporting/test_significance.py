"""The quantiles, p-values and levels that all comparisons share."""

import pytest
from scipy import stats

from pretrainax.reporting.significance import holm_levels, p_value, t_quantile


def test_quantiles_and_p_values_are_scipys():
    assert t_quantile(4) == pytest.approx(stats.t.ppf(0.975, 4))
    assert p_value(-1.5, 0.5, 4) == pytest.approx(2 * stats.t.sf(3, 4))
    assert p_value(1.5, 0.5, None) == pytest.approx(2 * stats.norm.sf(3))


def test_an_unknown_error_is_never_significant():
    assert p_value(1.5, None, 4) == p_value(0.0, 0.0, 4) == 1.0


def test_equal_observations_have_the_p_value_of_the_sign_test():
    assert p_value(1.5, 0.0, 9) == pytest.approx(stats.binomtest(10, 10).pvalue)


def test_levels_grow_until_a_comparison_fails():
    levels = holm_levels([0.04, 0.01, 0.03, 0.001])
    assert levels == pytest.approx([0.05 / 2, 0.05 / 3, 0.05 / 2, 0.05 / 4])  # 0.03 fails at 0.025, so 0.04 fails too.
