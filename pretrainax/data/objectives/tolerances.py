"""Computes the tolerances of statistics: how far a correct objective's rate may be from its expected value.

A tolerance is exceeded by chance in one of 1.7 million checks, as with 5 standard deviations of a normal distribution.
A fault that shifts a rate by 1.4 times the tolerance is found in 98 % of checks (2 more standard deviations), so this
is the smallest deviation that a check finds reliably.
"""

import math

_FALSE_ALARMS = 2.87e-7  # on each side: P(Z > 5)
ROUNDING_ERROR = 1e-6  # of floating-point numbers; the tolerance of a rate without randomness


def binomial_tolerance(draws: float, probability: float) -> float:
    """Computes the tolerance of the fraction of successes in independent draws, from the exact binomial distribution.

    With few draws or a small probability, the distribution is too skewed for 5 standard deviations.

    Args:
      draws: number of draws; for draws that count differently often, the effective number (sum n)^2 / sum n^2.
      probability: probability of success of each draw.
    """
    from scipy.stats import binom  # slow to import

    if not 0.0 < probability < 1.0 or draws < 1:
        return ROUNDING_ERROR if draws >= 1 else math.inf
    count = math.floor(draws)
    low, high = binom.ppf(_FALSE_ALARMS, count, probability), binom.isf(_FALSE_ALARMS, count, probability)
    return float(max(high - count * probability, count * probability - low)) / count + ROUNDING_ERROR


def one_sided_tolerance(measured: float, expected: float, below: float, above: float) -> float:
    """Returns the tolerance on the side of `expected` on which `measured` is: `below` or `above`, plus rounding."""
    return max(below if measured < expected else above, 0.0) + ROUNDING_ERROR


def rounded_tolerance(measured: float, expected: float, rounded: float, sampling: float = 0.0) -> float:
    """Computes the tolerance of a rate that differs from `expected` because numbers of tokens are whole numbers.

    Args:
      rounded: the value of a correct objective or, if it is random, its mean.
      sampling: tolerance of the deviation from `rounded`.
    """
    return one_sided_tolerance(measured, expected, expected - rounded + sampling, rounded - expected + sampling)
