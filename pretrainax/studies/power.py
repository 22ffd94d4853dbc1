"""Computes the power of a study before it starts, and the number of seeds that a difference requires.

All functions describe the paired t tests of `studies/verdicts.py`: `spread` is the standard deviation over seeds of the
paired difference, and effects, margins and errors have the unit of the measure.
"""

import math
from collections.abc import Callable
from typing import Optional

import numpy as np

from pretrainax.reporting.significance import ALPHA, t_quantile
from pretrainax.studies.contrasts import Noise

TARGET = 0.8  # usual power of a study
MAX_SEEDS = 1000  # larger numbers of seeds are not proposed
_POINTS = 500  # points of the integral over the estimated error; more points change the power by less than 1e-4


def power(effect: float, seeds: int, noise: Noise, alpha: float = ALPHA) -> float:
    """Returns the probability that the verdict on a true difference has its direction: the noncentral t distribution.

    Args:
      effect: the true difference.
      seeds: number of pretraining seeds, at least 2.
      alpha: two-sided level of the test.
    """
    from scipy.special import ndtr  # local import, because it takes 0.2 s

    degrees, error = float(noise.degrees(seeds)), math.sqrt(noise.variance(seeds))
    # scipy's noncentral t distribution returns 0 and NaN for some large effects.
    return float(ndtr(abs(effect) / error - t_quantile(degrees, alpha) * _estimated_errors(degrees)).mean())


def equivalence_power(margin: float, seeds: int, noise: Noise, alpha: float = ALPHA, effect: float = 0.0) -> float:
    """Returns the probability of the verdict "equivalent" by two one-sided tests (Schuirmann 1987).

    Args:
      margin: differences below it count as equal.
      alpha: level of each one-sided test.
      effect: the true difference.
    """
    from scipy.special import ndtr

    degrees, error = float(noise.degrees(seeds)), math.sqrt(noise.variance(seeds))
    room = margin / error - t_quantile(degrees, 2 * alpha) * _estimated_errors(degrees)
    inside = ndtr(room - effect / error) - ndtr(-room - effect / error)
    return float(np.where(room > 0, inside, 0.0).mean())


def _estimated_errors(degrees: float) -> np.ndarray:
    """Returns quantiles of the estimated error in units of the true error, sqrt(chi² / degrees), [_POINTS]."""
    from scipy.special import chdtri

    return np.sqrt(chdtri(degrees, (np.arange(_POINTS) + 0.5) / _POINTS) / degrees)


def smallest_effect(seeds: int, noise: Noise, alpha: float = ALPHA, target: float = TARGET) -> float:
    """Returns the smallest true difference that the study finds with probability `target`."""
    low, high = 0.0, math.sqrt(noise.variance(seeds))
    while power(high, seeds, noise, alpha) < target:
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, seeds, noise, alpha) < target else (low, middle)
    return high


def seeds_needed(power_of: Callable[[int], float], target: float = TARGET) -> Optional[int]:
    """Returns the smallest number of seeds, from 2 to MAX_SEEDS, whose power is at least `target`; None: more.

    Args:
      power_of: power for a number of seeds; it increases with the number.
    """
    if power_of(MAX_SEEDS) < target:
        return None
    low, high = 1, MAX_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if power_of(middle) < target else (low, middle)
    return high
