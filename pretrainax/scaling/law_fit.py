"""Fits the constants of L(N, D) = E + A / N^alpha + B / D^beta to the final losses of runs.

The method is approach 3 of Hoffmann et al. 2022 (appendix D.2): it minimizes the Huber loss of the errors in log L,
with a delta of 1e-3, from a grid of initial points.

NOTE The paper uses L-BFGS. This module uses Levenberg-Marquardt with reweighted residuals, which minimizes the same
cost, for all initial points and all resamples at once. L-BFGS may stop too early if the cost is not scaled, as happened
in the paper's own fit (Besiroglu et al. 2024, section 4.1; recalled).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pretrainax.reporting.units import large_number
from pretrainax.scaling.power_laws import CONSTANTS, LossLaw

DELTA = 1e-3  # delta of the Huber loss, in log L
STARTS = 64  # number of initial points, the best of 225 in the grid; nearly all of them lead to the same minimum
RESAMPLES = 400  # number of laws that the bootstrap fits
COVERAGE = 0.95  # coverage of the intervals of the law's constants
EXPONENTS = (0.01, 3.0)  # bounds of alpha and beta; a term with a smaller exponent is indistinguishable from E
_MIN_SHARE = 1e-3  # a term below this fraction of the loss in every run is not measured
_MAX_STEPS = 400  # updates of a fit; half of the fits need fewer than 60


class Run(NamedTuple):
    """A finished run: its workdir, its numbers of parameters and tokens, and its last validation loss."""

    workdir: str
    parameters: int  # number of parameters without embeddings
    tokens: float  # number of tokens of text that all steps train on
    loss: float  # value of the metric `Fit.metric` in the last validation


class Fit(NamedTuple):
    """A law fitted to runs, the laws fitted to bootstrap resamples, and the runs themselves."""

    law: LossLaw
    resampled: list[LossLaw]  # laws fitted to resampled residuals (bootstrap)
    runs: list[Run]  # the runs to which the law was fitted
    left_out: list[str]  # one line per excluded run, with the reason
    metric: str = "loss"  # the fitted metric: `config.evaluate.select_by` of the runs
    unidentified: tuple[str, ...] = ()  # one line per term of the law that the runs do not determine


class Problem:
    """The minimization problem: min over t of sum Huber(log(exp(e) + exp(a - alpha n) + exp(b - beta d)) - log L).

    The variables are t = (e, a, alpha, b, beta). The method `constants` converts them to the law's constants. n is
    log N minus its mean over the runs, and d is log D minus its mean. If the means were not subtracted, a and alpha
    would be nearly collinear. All methods work on many problems at once: arrays `t` are [..., 5].
    """

    def __init__(self, parameters: np.ndarray, tokens: np.ndarray):
        n, d = np.log(parameters), np.log(tokens)
        self.n_mean, self.d_mean = n.mean(), d.mean()
        self.n, self.d = n - self.n_mean, d - self.d_mean

    def terms(self, t: np.ndarray) -> np.ndarray:
        """Computes the logs of the law's three terms for each run, [..., runs, 3]."""
        e, a, alpha, b, beta = np.moveaxis(t[..., None], -2, 0)
        return np.stack(np.broadcast_arrays(e, a - alpha * self.n, b - beta * self.d), axis=-1)

    def predict(self, t: np.ndarray) -> np.ndarray:
        """Computes the log L that the variables `t` predict for each run, [..., runs]."""
        return np.logaddexp.reduce(self.terms(t), axis=-1)

    def slope(self, t: np.ndarray) -> np.ndarray:
        """Computes the derivatives [..., runs, 5] of the predicted log L with respect to the variables `t`."""
        terms = self.terms(t)
        e, a, b = np.moveaxis(np.exp(terms - np.logaddexp.reduce(terms, axis=-1)[..., None]), -1, 0)
        return np.stack([e, a, -a * self.n, b, -b * self.d], axis=-1)

    def cost(self, t: np.ndarray, log_loss: np.ndarray) -> np.ndarray:
        """Computes the sum of the Huber losses over the runs, [...]."""
        errors = np.abs(self.predict(t) - log_loss)
        return np.where(errors < DELTA, errors**2 / 2, DELTA * (errors - DELTA / 2)).sum(axis=-1)

    def descend(self, starts: np.ndarray, log_loss: np.ndarray) -> np.ndarray:
        """Minimizes the costs of several problems, and returns the variables [problems, 5] of a local minimum of each.

        Args:
          starts: initial values of the variables, [problems, 5].
          log_loss: each run's log L, [problems, runs].
        """
        median = float(np.median(log_loss))
        low = np.array([median - 30, median - 30, EXPONENTS[0], median - 30, EXPONENTS[0]])
        high = np.array([median + 30, median + 30, EXPONENTS[1], median + 30, EXPONENTS[1]])
        t = np.clip(starts, low, high)
        cost, damping, stalled = self.cost(t, log_loss), np.full(len(t), 1e-2), np.zeros(len(t), int)
        live = np.arange(len(t))  # problems that have not converged
        for _ in range(_MAX_STEPS):
            step = self._step(t[live], log_loss[live], damping[live], low, high)
            moved = np.clip(t[live] - step, low, high)
            gain = cost[live] - (moved_cost := self.cost(moved, log_loss[live]))
            better = gain >= 0
            t[live[better]], cost[live[better]] = moved[better], moved_cost[better]
            damping[live] = np.clip(damping[live] * np.where(better, 0.2, 5), 1e-9, 1e12)
            has_stalled = gain <= 1e-9 * cost[live] + 1e-16
            stalled[live] = np.where(better, (stalled[live] + 1) * has_stalled, stalled[live])
            live = live[(stalled[live] < 3) & (damping[live] < 1e12)]
            if not len(live):
                break
        return t

    def _step(self, t: np.ndarray, log_loss: np.ndarray, damping: np.ndarray, low, high) -> np.ndarray:
        """Computes the damped Gauss-Newton steps [problems, 5] to subtract; variables at a bound that they push stay.

        An error above DELTA has the weight DELTA / |error|, so that its gradient is the Huber loss's.
        """
        errors, slope = self.predict(t) - log_loss, self.slope(t)
        weighted = (DELTA / np.maximum(np.abs(errors), DELTA))[..., None] * slope
        gradient = np.einsum("pri,pr->pi", weighted, errors)
        free = ~((t <= low) & (gradient > 0) | (t >= high) & (gradient < 0))
        matrix = np.einsum("pri,prj->pij", weighted, slope) * free[:, :, None] * free[:, None, :]
        diagonal = np.einsum("pii->pi", matrix)
        added = np.where(free, damping[:, None] * np.maximum(diagonal, 1e-9), 1.0)
        return np.linalg.solve(matrix + np.eye(5) * added[:, :, None], (gradient * free)[..., None])[..., 0]

    def solve(self, log_loss: np.ndarray) -> np.ndarray:
        """Finds the variables `t` with the lowest cost, by minimizing from each of the STARTS best initial points."""
        points = np.array(list(_initial_points(float(np.median(log_loss)))))
        points = points[np.argsort(np.abs(self.predict(points) - log_loss).sum(axis=-1), kind="stable")[:STARTS]]
        t = self.descend(points, np.tile(log_loss, (len(points), 1)))
        return t[np.argmin(self.cost(t, log_loss))]

    def constants(self, t: np.ndarray) -> dict[str, float]:
        """Converts the variables `t`, [5], to the law's constants: a dict with the keys CONSTANTS."""
        e, a, alpha, b, beta = t
        values = np.exp(e), np.exp(a + alpha * self.n_mean), alpha, np.exp(b + beta * self.d_mean), beta
        return dict(zip(CONSTANTS, map(float, values), strict=True))


def _initial_points(median: float) -> Iterator[list[float]]:
    """Yields the initial points: a grid over four properties of the law.

    The properties are the fraction of the median loss that is due to E, the fraction of the rest that is due to N,
    alpha, and beta.
    """
    exponents = (0.1, 0.3, 0.5, 0.8, 1.2)
    for e_fraction, fraction, alpha, beta in itertools.product((0.2, 0.5, 0.8), (0.2, 0.5, 0.8), exponents, exponents):
        e, a, b = np.log([e_fraction, (1 - e_fraction) * fraction, (1 - e_fraction) * (1 - fraction)]) + median
        yield [e, a, alpha, b, beta]


def fit(runs: Sequence[Run], family: str, source: str, seed: int = 0) -> tuple[LossLaw, list[LossLaw]]:
    """Fits the law to runs; returns (the law, RESAMPLES laws from a bootstrap of the residuals).

    The bootstrap keeps each run's N and D, because the user chose these values, and adds normal noise to the
    predicted log L. The noise variance of each resample is the sum of squared residuals divided by a draw from the
    chi-squared distribution with n - 5 degrees of freedom, for n runs and five constants. For a linear model, the
    intervals of such resamples are those of the t distribution. In simulations with known laws and 0.3 % noise, the
    95 % intervals contained the true constants in 94 to 97 % of ladders of 8 to 20 runs, and in 92 to 94 % of ladders
    of 6 or 7 runs.

    Args:
      family: model family of the runs.
      source: description of the runs, stored in the law.
      seed: random seed of the bootstrap.
    """
    parameters, tokens, losses = (np.array([getattr(r, k) for r in runs], float) for k in Run._fields[1:])
    problem, log_loss = Problem(parameters, tokens), np.log(losses)
    best = problem.solve(log_loss)
    predicted = problem.predict(best)
    rng, spare = np.random.default_rng(seed), len(runs) - len(CONSTANTS)
    deviations = np.sqrt(np.square(log_loss - predicted).sum() / rng.chisquare(spare, (RESAMPLES, 1)))
    noise = deviations * rng.standard_normal((RESAMPLES, len(runs)))
    resampled = problem.descend(np.tile(best, (RESAMPLES, 1)), predicted + noise)

    def law(t: np.ndarray) -> LossLaw:
        return LossLaw(**problem.constants(t), source=source, with_embeddings=False, family=family)

    return law(best), [law(t) for t in resampled]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Computes the (lower, upper) bounds of the interval that contains the central 95 % of the values."""
    low, high = np.quantile(values, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return float(low), float(high)


def unidentified(resampled: Sequence[LossLaw], runs: Sequence[Run]) -> tuple[str, ...]:
    """Lists the terms of the law that the runs do not determine, one line each, with the runs that would.

    A term is not determined if the interval of its exponent reaches a bound of the fit (EXPONENTS), or if it may be
    less than _MIN_SHARE of the loss in every run.
    """
    lines = []
    rows = (
        ("A", "alpha", "N", "parameters", "sizes with equal tokens"),
        ("B", "beta", "D", "tokens", "amounts of text with equal sizes"),
    )
    for constant, exponent, variable, name, wanted in rows:
        values = [getattr(run, name) for run in runs]
        low, high = interval([getattr(law, exponent) for law in resampled])
        largest = min(values)  # the term is largest there
        shares = [getattr(law, constant) / largest ** getattr(law, exponent) for law in resampled]
        share, _ = interval(np.array(shares) / np.median([run.loss for run in runs]))
        if low > 1.01 * EXPONENTS[0] and high < 0.99 * EXPONENTS[1] and share > _MIN_SHARE:
            continue
        extent = f"{large_number(min(values))} to {large_number(max(values))} {name}"
        lines.append(
            f"{constant} / {variable}^{exponent}: the interval of {exponent} is {low:.2g} to {high:.2g}; the runs have "
            f"{extent}: add runs below and above, {wanted}, or more seeds"
        )
    return tuple(lines)
