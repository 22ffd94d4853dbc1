"""Computes profile-likelihood intervals of a fitted law's constants, and prediction intervals of further runs.

The interval of a constant contains all values whose best fit costs at most scale · F / 2 more than the best fit of all.
F is the quantile of the F distribution with 1 and n - p degrees of freedom, for n independent runs and p constants. The
scale is the noise variance of log L. For a linear model, these are the intervals of the t distribution. For errors
beyond the delta of the Huber loss, the scale has the correction of the robust likelihood-ratio test (Heritier and
Ronchetti 1994; recalled). A prediction interval contains all losses of one more run that the same test would accept;
it therefore contains the noise of that run.

Errors of runs with the same trunk are correlated. The fit estimates the correlation, which reduces the degrees of
freedom (`law_fit.Problem`).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import stats

from pretrainax.reporting.units import large_number
from pretrainax.scaling.law_fit import DELTA, EXPONENTS, REPETITIONS, Problem, Pull
from pretrainax.scaling.power_laws import REPETITION, LossLaw

COVERAGE = 0.95  # coverage of the intervals of the law's constants
PREDICTION_COVERAGE = 0.9  # coverage of prediction intervals
_MIN_SHARE = 1e-3  # E below this fraction of every loss is not measured
_FARTHEST = 50.0  # largest change of log A and log B in the search
_MAX_TRIALS = 30  # trials of the search for the end of an interval; most need 5


class Interval(NamedTuple):
    """An interval of a constant."""

    low: float
    high: float
    is_bounded: bool  # False: an end is the limit of the search, not of the evidence

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}{'' if self.is_bounded else ' (not bounded by the runs)'}"


class Intervals(NamedTuple):
    """The intervals of a law's constants, the laws at their ends, and the constants that the runs do not determine."""

    of: dict[str, Interval]  # keys: CONSTANTS, "exponent", and REPETITION if the law has it
    extremes: list[LossLaw]  # the best laws with a constant at an end of its interval
    noise: float  # standard deviation of a run's log L
    unidentified: tuple[str, ...]  # one line per constant whose interval is not bounded


class _Quantity(NamedTuple):
    """A function of the variables t that is constrained to a value v: rows(v) · t = offset(v)."""

    start: float  # value of the function in the best fit
    error: float  # standard error of the function in the linearized problem
    limits: tuple[float, float]
    pull: Callable[[float], tuple[np.ndarray, float]]  # v -> (direction [constants], target)
    display: Callable[[float], float] = float  # v -> value of the constant


def scale(problem: Problem, t: np.ndarray) -> float:
    """Computes the noise variance of log L that the intervals use, from the errors of the best fit."""
    errors = np.abs(problem.errors(t, problem.log_loss))
    squares = np.square(np.minimum(errors, DELTA)).sum() / max(len(errors) - problem.size, 1)
    return max(float(squares / max(np.mean(errors < DELTA), 0.1)), 1e-16)


def best_fit(law: LossLaw) -> tuple[Problem, np.ndarray, float]:
    """Returns the problem of a fitted law, its best variables [constants], and the noise variance of log L."""
    problem = Problem(law.runs, law.repetition is not None, law.correlation)
    (t,) = problem.descend(problem.variables(law)[None], problem.log_loss[None])
    return problem, t, scale(problem, t)


def intervals(law: LossLaw, coverage: float = COVERAGE) -> Intervals:
    """Computes the intervals of a fitted law's constants; `law` must have its runs."""
    problem, t, variance = best_fit(law)
    quantities = _quantities(problem, t, variance)
    searches = [(name, sign) for name in quantities for sign in (-1, 1)]
    threshold = variance * _quantile(problem, coverage) ** 2 / 2

    def trial(live: np.ndarray, values: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = [quantities[searches[i][0]].pull(value) for i, value in zip(live, values, strict=True)]
        pull = Pull(np.array([row for row, _ in rows]), np.array([target for _, target in rows]))
        log_loss = np.tile(problem.log_loss, (len(starts), 1))
        found = problem.descend(starts, log_loss, pull)
        return problem.cost(found, log_loss), found

    start = np.array([quantities[name].start for name, _ in searches])
    first = np.array([sign * quantities[name].error for name, sign in searches])
    limits = np.array([quantities[name].limits[sign > 0] for name, sign in searches])
    ends, found, is_bounded = _search(trial, start, start + first, limits, threshold, np.tile(t, (len(start), 1)))
    of = {}
    for i, (name, quantity) in enumerate(quantities.items()):
        low, high = (quantity.display(end) for end in ends[2 * i : 2 * i + 2])
        of[name] = Interval(low, high, bool(is_bounded[2 * i : 2 * i + 2].all()))
    extremes = [_with_constants(law, problem.constants(one)) for one in found]
    return Intervals(of, extremes, variance**0.5, _unidentified(law, of))


def prediction_interval(
    law: LossLaw, parameters: float, tokens: float, epochs: float = 1.0, coverage: float = PREDICTION_COVERAGE
) -> tuple[float, float]:
    """Computes the interval of the loss of one more run of a fitted law; `law` must have its runs."""
    problem, t, variance = best_fit(law)
    more = problem.with_run(parameters, tokens, epochs)
    threshold = variance * _quantile(problem, coverage) ** 2 / 2

    def trial(_: np.ndarray, values: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        log_loss = np.stack([np.append(problem.log_loss, value) for value in values])
        found = more.descend(starts, log_loss)
        return more.cost(found, log_loss), found

    start = float(more.predict(t)[-1])
    slope, cov = more.slope(t)[-1], _covariance(problem, t, variance)
    step = (variance + min(float(slope @ cov @ slope), 1.0)) ** 0.5
    signs = np.array([-1.0, 1.0])
    ends, _, _ = _search(
        trial, np.full(2, start), start + step * signs, start + 5 * signs, threshold, np.tile(t, (2, 1))
    )
    low, high = np.exp(ends)
    return float(low), float(high)


def _search(
    trial: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    start: np.ndarray,
    first: np.ndarray,
    limits: np.ndarray,
    threshold: float,
    t: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds the values at which the cost exceeds the lowest cost by `threshold`, for many searches at once.

    The square root of the excess cost is nearly linear in the value, so regula falsi converges fast. It converges
    slowly if the cost is flat at first, as over log E near E = 0. Therefore, after a few trials, every second trial
    bisects.

    Args:
      trial: (indices of the searches, their values, initial variables) -> (costs, best variables).
      start: the values of the best fit.
      first: the first values to try.
      limits: the farthest values to try.
      threshold: the excess cost.
      t: the variables of the best fit, [searches, constants].

    Returns:
      (values [searches], their variables, whether the threshold was reached before the limit).
    """
    reach, sign = np.abs(limits - start), np.sign(limits - start)
    inner, inner_t, at_inner = start.copy(), t.copy(), np.full_like(start, -1.0)  # the end is between inner and outer
    outer, at_outer = np.full_like(start, np.nan), np.full_like(start, np.nan)
    value, found = start + sign * np.clip(np.abs(first - start), 1e-9, reach), t.copy()
    live, lowest = np.arange(len(start)), trial(np.arange(len(start)), start, t)[0]
    for trials in range(_MAX_TRIALS):
        cost, found[live] = trial(live, value[live], inner_t[live])
        excess = np.sqrt(np.maximum(cost - lowest[live], 0) / threshold) - 1
        inside, outside = live[excess < 0], live[excess >= 0]
        inner[inside], inner_t[inside], at_inner[inside] = value[inside], found[inside], excess[excess < 0]
        outer[outside], at_outer[outside] = value[outside], excess[excess >= 0]
        at_limit = np.abs(value[live] - start[live]) >= 0.999 * reach[live]
        live = live[(np.abs(excess) > 1e-3) & ~(at_limit & (excess < 0))]
        if not len(live):
            break
        farther = start + sign * np.minimum(np.abs(inner - start) * np.where(at_inner > -0.3, 1.5, 4.0), reach)
        is_flat = trials >= 6 and trials % 2
        fraction = 0.5 if is_flat else np.clip(-at_inner / (at_outer - at_inner), 0.05, 0.95)
        value[live] = np.where(np.isnan(outer), farther, inner + fraction * (outer - inner))[live]
    is_bounded = ~np.isnan(outer) | (at_inner > -1e-3)
    return value, found, is_bounded


def _quantities(problem: Problem, t: np.ndarray, variance: float) -> dict[str, _Quantity]:
    """Returns the constants of the law as functions of the variables."""
    e, a, alpha, b, beta, *repetition = np.eye(problem.size)
    smallest = float(problem.log_loss.min())
    log_a, log_b = a + problem.n_mean * alpha, b + problem.d_mean * beta
    share = float(t[4] / (t[2] + t[4]))
    cov = _covariance(problem, t, variance)

    def linear(direction: np.ndarray, limits: tuple[float, float], display=float) -> _Quantity:
        start = float(direction @ t)
        low, high = min(limits[0], start), max(limits[1], start)
        error = min(float(direction @ cov @ direction) ** 0.5, (high - low) / 4)
        return _Quantity(start, error, (low, high), lambda value: (direction, value), display)

    def around(direction: np.ndarray) -> tuple[float, float]:
        return float(direction @ t) - _FARTHEST, float(direction @ t) + _FARTHEST

    def exp(value: float) -> float:
        return float(np.exp(value))

    slope = (t[2] * beta - t[4] * alpha) / (t[2] + t[4]) ** 2
    found = {
        "E": linear(e, (smallest + float(np.log(_MIN_SHARE)), smallest + 0.5), exp),
        "A": linear(log_a, around(log_a), exp),
        "alpha": linear(alpha, EXPONENTS),
        "B": linear(log_b, around(log_b), exp),
        "beta": linear(beta, EXPONENTS),
    }
    if repetition:
        found[REPETITION] = linear(repetition[0], tuple(np.log(REPETITIONS).tolist()), exp)
    error = min(float(slope @ cov @ slope) ** 0.5, 0.1)
    found["exponent"] = _Quantity(share, error, (0.004, 0.996), lambda v: ((1 - v) * beta - v * alpha, 0.0))
    return found


def _covariance(problem: Problem, t: np.ndarray, variance: float) -> np.ndarray:
    """Computes the covariance [constants, constants] of the variables in the linearized problem."""
    slope = problem.whitening @ problem.slope(t)
    return variance * np.linalg.inv(slope.T @ slope + 1e-9 * np.eye(problem.size))


def _quantile(problem: Problem, coverage: float) -> float:
    return float(stats.t.ppf((1 + coverage) / 2, problem.freedom))


def _with_constants(law: LossLaw, constants: dict[str, float]) -> LossLaw:
    return LossLaw(**constants, source=law.source, with_embeddings=law.with_embeddings, family=law.family)


def _unidentified(law: LossLaw, of: dict[str, Interval]) -> tuple[str, ...]:
    """Lists the terms that the runs do not determine, one line each; a line describes the runs that are missing."""
    lines = []
    if not of["E"].is_bounded:
        lines.append(f"E: its interval is {of['E']}; add larger runs")
    rows = (("A", "alpha", "N", "parameters", "sizes with equal tokens"),)
    rows += (("B", "beta", "D", "tokens", "amounts of text with equal sizes"),)
    for constant, exponent, variable, name, wanted in rows:
        if of[constant].is_bounded and of[exponent].is_bounded:
            continue
        values = [getattr(run, name) for run in law.runs]
        lines.append(
            f"{constant} / {variable}^{exponent}: the interval of {exponent} is {of[exponent]}; the runs have "
            f"{large_number(min(values))} to {large_number(max(values))} {name}: add runs below and above, {wanted}, "
            "or more seeds"
        )
    return tuple(lines)
