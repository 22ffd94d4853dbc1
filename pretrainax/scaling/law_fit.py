"""Fits the constants of L(N, D) = E + A / N^alpha + B / D^beta to the final losses of runs.

The method is approach 3 of Hoffmann et al. 2022 (appendix D.2): it minimizes the Huber loss of the errors in log L from
a grid of initial points. E is free. If runs repeat their text, D is the effective number of tokens, with a sixth
constant (`power_laws.effective_tokens`).

NOTE The paper uses L-BFGS and a delta of 1e-3. This module uses Levenberg-Marquardt with reweighted residuals, which
minimizes the same cost, for all initial points at once. L-BFGS may stop too early if the cost is not scaled. This
happened in the paper's fit (Besiroglu et al. 2024, section 4.1; recalled). A delta of 1e-3 is below the differences
between seeds. With it, the fit would minimize absolute errors, and one run per constant would have an error of 0.
"""

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.scaling.power_laws import CONSTANTS, REPETITION, LossLaw, Run, effective_tokens

DELTA = 1e-2  # delta of the Huber loss, in log L: three standard deviations if the losses of seeds differ by 0.3 %
STARTS = 64  # number of initial points, the best of 225 in the grid; nearly all of them lead to the same minimum
EXPONENTS = (0.01, 3.0)  # bounds of alpha and beta; a term with a smaller exponent is indistinguishable from E
REPETITIONS = (0.1, 1000.0)  # bounds of R*; Muennighoff et al. 2023 found 15.4
MIN_EPOCHS = 2.0  # epochs of a run that measures the value of repeated text
CORRELATIONS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95)  # candidates for the correlation of errors in the same trunk
_PULL = 30.0  # weight of a constraint: its error is then below 1e-5 of an interval
_MAX_STEPS = 400  # updates of a fit; half of the fits need fewer than 60


class Pull(NamedTuple):
    """A constraint `direction` · t = `target` of each problem, with the cost (_PULL · error)² / 2."""

    direction: np.ndarray  # [problems, constants]
    target: np.ndarray  # [problems]


class Problem:
    """The minimization problem: min over t of sum Huber(log(exp(e) + exp(a - alpha n) + exp(b - beta d)) - log L).

    The variables are t = (e, a, alpha, b, beta), and log R* if there is a repetition term. The method `constants`
    converts them to the law's constants. n is log N minus its mean over the runs, and d is the log of the effective
    tokens minus the mean of log D. Without this subtraction, a and alpha would be nearly collinear. All methods work on
    many problems at once: arrays `t` are [..., constants].
    """

    def __init__(self, runs: Sequence[Run], repeats: bool, correlation: float = 0.0):
        """Prepares the runs.

        Args:
          repeats: whether the law has a repetition term.
          correlation: correlation of the errors of two runs with the same trunk.
        """
        n, d, self.log_loss = (np.log([getattr(r, k) for r in runs]) for k in ("parameters", "tokens", "loss"))
        self.n_mean, self.d_mean, self.repeats = float(n.mean()), float(d.mean()), repeats
        self.n, self.d = n - self.n_mean, d - self.d_mean
        self.epochs = np.maximum([r.epochs for r in runs], 1.0)
        self.size = len(CONSTANTS) + repeats  # number of constants
        self.deltas = np.full(len(runs), DELTA)
        self.whitening = _whitening([run.trunk for run in runs], correlation)  # [runs, runs]
        # Degrees of freedom of the variance. Fully correlated errors differ only between trunks, and these differences
        # determine three constants (E, A, alpha). The interpolation is an approximation.
        trunks = len({run.trunk or str(i) for i, run in enumerate(runs)})
        shares = (1 - correlation) * (len(runs) - self.size) + correlation * (trunks - 3)
        self.freedom = max(float(shares), 1.0)

    def with_run(self, parameters: float, tokens: float, epochs: float) -> "Problem":
        """Returns the problem with one more run, whose error has a squared cost; callers append the run's log L."""
        more = copy.copy(self)
        more.n = np.append(self.n, np.log(parameters) - self.n_mean)
        more.d = np.append(self.d, np.log(tokens) - self.d_mean)
        more.epochs = np.append(self.epochs, max(epochs, 1.0))
        more.deltas = np.append(self.deltas, 1e6)
        more.whitening = np.block(
            [[self.whitening, np.zeros((len(self.n), 1))], [np.zeros((1, len(self.n))), np.ones(1)]]
        )
        return more

    def errors(self, t: np.ndarray, log_loss: np.ndarray) -> np.ndarray:
        """Computes the errors of log L, transformed so that errors of one trunk are not correlated; [..., runs]."""
        return (self.predict(t) - log_loss) @ self.whitening.T

    def _log_data(self, t: np.ndarray) -> np.ndarray:
        """Computes log D, or the log of the effective tokens, minus the mean of log D; [..., runs]."""
        if not self.repeats:
            return self.d
        return self.d + np.log(effective_tokens(1.0, self.epochs, np.exp(t[..., -1:])))

    def terms(self, t: np.ndarray) -> np.ndarray:
        """Computes the logs of the law's three terms for each run, [..., runs, 3]."""
        e, a, alpha, b, beta = np.moveaxis(t[..., : len(CONSTANTS), None], -2, 0)
        return np.stack(np.broadcast_arrays(e, a - alpha * self.n, b - beta * self._log_data(t)), axis=-1)

    def predict(self, t: np.ndarray) -> np.ndarray:
        """Computes the log L that the variables `t` predict for each run, [..., runs]."""
        return np.logaddexp.reduce(self.terms(t), axis=-1)

    def slope(self, t: np.ndarray) -> np.ndarray:
        """Computes the derivatives [..., runs, constants] of the predicted log L with respect to the variables `t`."""
        terms = self.terms(t)
        e, a, b = np.moveaxis(np.exp(terms - np.logaddexp.reduce(terms, axis=-1)[..., None]), -1, 0)
        columns = [e, a, -a * self.n, b, -b * self._log_data(t)]
        if self.repeats:
            limit, repetitions = np.exp(t[..., -1:]), self.epochs - 1
            left = np.exp(-repetitions / limit)
            change = (limit * (1 - left) - repetitions * left) / (1 + limit * (1 - left))  # d log D' / d log R*
            columns.append(-b * t[..., 4:5] * change)
        return np.stack(columns, axis=-1)

    def cost(self, t: np.ndarray, log_loss: np.ndarray, pull: Optional[Pull] = None) -> np.ndarray:
        """Computes the sum of the Huber losses over the runs, and of the constraints' costs; [...]."""
        errors = np.abs(self.errors(t, log_loss))
        huber = np.where(errors < self.deltas, errors**2 / 2, self.deltas * (errors - self.deltas / 2)).sum(axis=-1)
        return huber if pull is None else huber + (_PULL * _pull_errors(t, pull)) ** 2 / 2

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lower and upper bounds of the variables, each [constants]."""
        median = float(np.median(self.log_loss))
        rows = [
            (median - 30, median + 30),
            (median - 30, median + 30),
            EXPONENTS,
            (median - 30, median + 30),
            EXPONENTS,
        ]
        low, high = np.array([*rows, np.log(REPETITIONS)] if self.repeats else rows).T
        return low, high

    def descend(self, starts: np.ndarray, log_loss: np.ndarray, pull: Optional[Pull] = None) -> np.ndarray:
        """Minimizes the costs of several problems; returns the variables [problems, constants] of their local minima.

        Args:
          starts: initial values of the variables, [problems, constants].
          log_loss: each run's log L, [problems, runs].
        """
        low, high = self.bounds()
        t = np.clip(starts, low, high)
        cost, damping, stalled = self.cost(t, log_loss, pull), np.full(len(t), 1e-2), np.zeros(len(t), int)
        live = np.arange(len(t))  # problems that have not converged
        for _ in range(_MAX_STEPS):
            pulled = pull and Pull(pull.direction[live], pull.target[live])
            moved = np.clip(t[live] - self._step(t[live], log_loss[live], damping[live], pulled), low, high)
            gain = cost[live] - (moved_cost := self.cost(moved, log_loss[live], pulled))
            better = gain >= 0
            t[live[better]], cost[live[better]] = moved[better], moved_cost[better]
            damping[live] = np.clip(damping[live] * np.where(better, 0.2, 5), 1e-9, 1e12)
            has_stalled = gain <= 1e-9 * cost[live] + 1e-16
            stalled[live] = np.where(better, (stalled[live] + 1) * has_stalled, stalled[live])
            live = live[(stalled[live] < 3) & (damping[live] < 1e12)]
            if not len(live):
                break
        return t

    def _step(self, t: np.ndarray, log_loss: np.ndarray, damping: np.ndarray, pull: Optional[Pull]) -> np.ndarray:
        """Computes damped Gauss-Newton steps [problems, constants] to subtract; 0 for variables that push a bound.

        An error above delta has the weight delta / |error|, so that its gradient is the gradient of the Huber loss.
        """
        errors, slope, (low, high) = self.errors(t, log_loss), self.whitening @ self.slope(t), self.bounds()
        weighted = (self.deltas / np.maximum(np.abs(errors), self.deltas))[..., None] * slope
        gradient, matrix = np.einsum("pri,pr->pi", weighted, errors), np.einsum("pri,prj->pij", weighted, slope)
        if pull is not None:
            gradient = gradient + _PULL**2 * _pull_errors(t, pull)[:, None] * pull.direction
            matrix = matrix + _PULL**2 * np.einsum("pi,pj->pij", pull.direction, pull.direction)
        free = ~((t <= low) & (gradient > 0) | (t >= high) & (gradient < 0))
        matrix = matrix * free[:, :, None] * free[:, None, :]
        diagonal = np.einsum("pii->pi", matrix)
        added = np.where(free, damping[:, None] * np.maximum(diagonal, 1e-9), 1.0)
        return np.linalg.solve(matrix + np.eye(self.size) * added[:, :, None], (gradient * free)[..., None])[..., 0]

    def solve(self) -> np.ndarray:
        """Finds the variables `t` with the lowest cost, by minimizing from each of the STARTS best initial points."""
        points = np.array(list(_initial_points(float(np.median(self.log_loss)), self.repeats)))
        points = points[np.argsort(np.abs(self.predict(points) - self.log_loss).sum(axis=-1), kind="stable")[:STARTS]]
        t = self.descend(points, np.tile(self.log_loss, (len(points), 1)))
        return t[np.argmin(self.cost(t, self.log_loss))]

    def constants(self, t: np.ndarray) -> dict[str, float]:
        """Converts the variables `t`, [constants], to the law's constants: a dict with the keys CONSTANTS, REPETITION.

        REPETITION is missing if there is no repetition term.
        """
        e, a, alpha, b, beta = t[: len(CONSTANTS)]
        values = np.exp(e), np.exp(a + alpha * self.n_mean), alpha, np.exp(b + beta * self.d_mean), beta
        found = dict(zip(CONSTANTS, map(float, values), strict=True))
        return found | ({REPETITION: float(np.exp(t[-1]))} if self.repeats else {})

    def variables(self, law: LossLaw) -> np.ndarray:
        """Converts a law's constants to the variables `t`, [constants]; the inverse of `constants`."""
        logs = np.log([law.E, law.A, law.B])
        t = [logs[0], logs[1] - law.alpha * self.n_mean, law.alpha, logs[2] - law.beta * self.d_mean, law.beta]
        return np.array([*t, np.log(law.repetition)] if law.repetition is not None else t)


def _whitening(trunks: Sequence[str], correlation: float) -> np.ndarray:
    """Returns the inverse square root [runs, runs] of the correlations of the runs' errors."""
    same = np.array([[a == b != "" for b in trunks] for a in trunks])
    values, vectors = np.linalg.eigh(np.where(np.eye(len(trunks)) > 0, 1.0, correlation * same))
    return (vectors / np.sqrt(values)) @ vectors.T


def _pull_errors(t: np.ndarray, pull: Pull) -> np.ndarray:
    return np.einsum("...i,...i->...", t, pull.direction) - pull.target


def _initial_points(median: float, repeats: bool) -> Iterator[list[float]]:
    """Yields the initial points: a grid over four properties of the law; R* starts at the value of the paper.

    The properties are the fraction of the median loss that is due to E, the fraction of the rest that is due to N,
    alpha, and beta.
    """
    exponents = (0.1, 0.3, 0.5, 0.8, 1.2)
    for e_fraction, fraction, alpha, beta in itertools.product((0.2, 0.5, 0.8), (0.2, 0.5, 0.8), exponents, exponents):
        e, a, b = np.log([e_fraction, (1 - e_fraction) * fraction, (1 - e_fraction) * (1 - fraction)]) + median
        yield [e, a, alpha, b, beta, *([np.log(15.4)] if repeats else [])]


def fit(runs: Sequence[Run], family: str, source: str, metric: str = LossLaw.metric, repeats: bool = False) -> LossLaw:
    """Fits the law to runs.

    Args:
      family: model family of the runs.
      source: description of the runs, stored in the law.
      metric: name of the validation metric whose values are the losses.
      repeats: whether the law has a repetition term (`measures_repetition`).
    """
    problem = Problem(runs, repeats)
    t, correlation = problem.solve(), 0.0
    if len({run.trunk for run in runs}) < len(runs):
        t, correlation = _with_correlation(runs, repeats, t)
    constants, fields = problem.constants(t), {"source": source, "family": family, "metric": metric}
    return LossLaw(**constants, **fields, with_embeddings=False, correlation=correlation, runs=tuple(runs))


def _with_correlation(runs: Sequence[Run], repeats: bool, start: np.ndarray) -> tuple[np.ndarray, float]:
    """Fits the law with correlated errors of runs that share a trunk; returns (variables t, correlation).

    The correlation is the value in `CORRELATIONS` with the largest restricted likelihood, which accounts for the
    constants that the same runs determine (Patterson and Thompson 1971; recalled).
    """
    found = []
    for correlation in CORRELATIONS:
        problem = Problem(runs, repeats, correlation)
        (t,) = problem.descend(start[None], problem.log_loss[None])
        errors, slope = problem.errors(t, problem.log_loss), problem.whitening @ problem.slope(t)
        spare = max(len(runs) - problem.size, 1)
        log_variance = np.log(np.square(errors).sum() / spare + 1e-16)
        log_determinants = np.linalg.slogdet(slope.T @ slope)[1] - 2 * np.linalg.slogdet(problem.whitening)[1]
        found.append((spare * log_variance + log_determinants, correlation, t))
    _, correlation, t = min(found, key=lambda row: row[0])
    return t, correlation


def measures_repetition(runs: Sequence[Run]) -> bool:
    """Returns True if the runs repeat their text so often that a repetition term can be fitted."""
    return len(runs) > len(CONSTANTS) + 1 and sum(run.epochs >= MIN_EPOCHS for run in runs) >= 2
