"""Computes the levels of a group-sequential study, which may end at interim looks at the results.

A test at 5 % at each look would find a difference between equal arms in more than 5 % of studies. The levels here spend
the error as O'Brien and Fleming's boundaries do (Lan and DeMets 1983): nearly nothing at early looks, so that the last
look has nearly the full level. With few seeds, the t statistics of the looks have no simple joint distribution.
Therefore a simulation of equal arms, with fixed random numbers, determines the levels.
"""

import functools
import math

import numpy as np

from pretrainax.files.errors import UserError
from pretrainax.reporting.significance import ALPHA

_STUDIES = 400_000  # simulated studies; the standard error of an error rate of 5 % is 0.03 points


def look_seeds(seeds: int, looks: int) -> tuple[int, ...]:
    """Returns the number of seeds at each look, evenly spaced; the last is `seeds`.

    Raises:
      UserError: a look would have fewer than two seeds.
    """
    counts = tuple(math.ceil(seeds * (i + 1) / looks) for i in range(looks))
    if looks > 1 and counts[0] < 2:
        raise UserError(
            f"stop.looks is {looks}; it must be at most {max(seeds - 1, 1)} for {seeds} seeds, because the first look "
            "needs two seeds"
        )
    return counts


@functools.cache
def look_levels(counts: tuple[int, ...], alpha: float = ALPHA) -> tuple[float, ...]:
    """Returns the level of the two-sided t test at each look, such that some look errs with probability `alpha`.

    Args:
      counts: number of seeds at each look, increasing, each at least 2.
    """
    if len(counts) == 1:
        return (alpha,)
    from scipy.special import stdtr  # local import, because it takes 0.2 s

    statistics, spent = simulated_statistics(counts, _STUDIES, seed=0), 0.0
    alive, levels = np.ones(_STUDIES, bool), []
    for t, count in zip(statistics.T, counts, strict=True):
        share = _spent(count / counts[-1], alpha)
        limit = np.sort(t[alive])[-1 - round((share - spent) * _STUDIES)]
        levels.append(2 * float(stdtr(count - 1, -limit)))
        alive, spent = alive & (t <= limit), share
    return tuple(levels)


def simulated_statistics(counts: tuple[int, ...], studies: int, seed: int) -> np.ndarray:
    """Simulates studies of two equal arms; returns the absolute t statistic at each look, [studies, looks].

    The sum and the sum of squares of the differences between two looks are drawn directly: a normal and a chi-square
    variable.
    """
    rng = np.random.default_rng(seed)
    sizes = np.diff(counts, prepend=0)
    sums = rng.standard_normal((studies, len(counts))) * np.sqrt(sizes)
    squares = 2 * rng.standard_gamma((sizes - 1) / 2, (studies, len(counts))) + np.square(sums) / sizes
    n, sums, squares = np.array(counts), sums.cumsum(axis=1), squares.cumsum(axis=1)
    error = np.sqrt((squares - np.square(sums) / n) / (n - 1) / n)
    return np.abs(sums / n) / error


def _spent(fraction: float, alpha: float) -> float:
    """Returns the error that may be spent when a fraction of the seeds is finished."""
    from scipy.special import ndtr, ndtri

    return alpha if fraction == 1 else 2 * float(ndtr(ndtri(alpha / 2) / math.sqrt(fraction)))
