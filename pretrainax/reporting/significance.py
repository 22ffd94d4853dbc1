"""Computes quantiles of the t distribution, p-values, and the levels of Holm's method for several comparisons."""

from collections.abc import Callable, Sequence
from typing import Optional

ALPHA = 0.05  # 1 - confidence of intervals; the probability of one or more false verdicts


def t_quantile(degrees: float, alpha: float = ALPHA) -> float:
    """Returns the two-sided quantile of the t distribution, in standard errors."""
    from scipy.special import stdtrit  # local import, because it takes 0.2 s

    return float(stdtrit(degrees, 1 - alpha / 2))


def p_value(value: float, error: Optional[float], degrees: Optional[float]) -> float:
    """Computes the two-sided p-value of the hypothesis that a true value is 0.

    Args:
      error: standard error of the value. None: unknown, so the p-value is 1. 0: all n observations are equal. The
        p-value is then 2 / 2^n, as in a sign test.
      degrees: degrees of freedom of the t distribution, n - 1 if the error is 0. None: the normal distribution.
    """
    from scipy.special import ndtr, stdtr

    if error is None or value == 0:
        return 1.0
    if error == 0:
        return 0.0 if degrees is None else 2.0**-degrees
    z = -abs(value) / error
    return 2 * float(ndtr(z) if degrees is None else stdtr(degrees, z))


def holm_levels(p_values: Sequence[float], level: Callable[[int], float] = lambda m: ALPHA / m) -> list[float]:
    """Returns the level of each comparison (Holm 1979); it is significant if its p-value is below its level.

    The level of the i-th smallest of m p-values is `level(m - i + 1)`, until one is not below its level. All later
    p-values have the level of that one.

    Args:
      level: level of each of several comparisons, given their number; by default Bonferroni's, ALPHA divided by it.
    """
    levels, remaining = [0.0] * len(p_values), len(p_values)
    for i in sorted(range(len(p_values)), key=p_values.__getitem__):
        levels[i] = level(remaining)
        remaining -= p_values[i] < levels[i]
    return levels
