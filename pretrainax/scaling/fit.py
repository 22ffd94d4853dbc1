"""Fits L(N, D) = E + A / N^alpha + B / D^beta to your own runs: `python -m pretrainax.plan --fit=runs/*`.

The method is approach 3 of Hoffmann et al. 2022 (appendix D.2): it minimizes the Huber loss of the errors in log L,
with a delta of 1e-3, from a grid of initial points. L is the last validation loss of a finished run. Losses from the
middle of a run are not used: the learning rate is still high there, so the loss is higher than at the end of a run with
a shorter schedule (section 3.1 of the paper). The loss is the metric `config.evaluate.select_by`, for example the
discriminator's loss for ELECTRA. N is the number of parameters without embeddings. D is the number of text tokens that
all steps train on: repeated text counts each time, and padding counts as text.

NOTE The paper uses L-BFGS. This module uses Gauss-Newton in a trust region, which minimizes the same cost. In our
comparison, L-BFGS needed more evaluations. L-BFGS may stop too early if the cost is not scaled, as happened in the
paper's own fit (Besiroglu et al. 2024, section 4.1; recalled).
"""

import glob
import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize

from pretrainax import config as config_lib
from pretrainax.config import Experiment, UserError, phases_of
from pretrainax.files.atomic_files import write_atomically
from pretrainax.reporting.units import large_number
from pretrainax.scaling.compute_optimal import count_parameters
from pretrainax.scaling.power_laws import LossLaw
from pretrainax.training.metrics import read_metrics

DELTA = 1e-3  # delta of the Huber loss, in log L
STARTS = 16  # number of initial points, the best of 225 in the grid; nearly all of them lead to the same minimum
RESAMPLES = 400  # number of laws that the bootstrap fits
COVERAGE = 0.95  # coverage of the intervals of the law's constants
CONSTANTS = ("E", "A", "alpha", "B", "beta")
MIN_RUNS = 6  # minimum number of runs for a fit: the number of constants + 1
# Fields of the config that must be equal in all runs, so that the losses are comparable.
_SAME = ("data.", "tokenizer", "objective", "model.family", "evaluate.objective", "evaluate.parameters")
_LOSSES = ("loss", "bits_per_token", "bits_per_byte")  # suffixes of the metrics that a fit supports


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


# --- runs ----------------------------------------------------------------------------------------------------------


def read_runs(pattern: str) -> tuple[list[Run], Experiment, list[str]]:
    """Reads the runs whose workdirs match a glob; returns (finished runs, config of the first run, excluded runs).

    Excluded runs are those without a final validation loss. The third item describes each of them in one line.

    Raises:
      UserError: no workdir matches, the losses of the runs are not comparable, or the selected metric is not a loss.
    """
    runs, left_out, first = [], [], None
    for workdir in sorted(glob.glob(os.path.expanduser(pattern))):
        if not all(os.path.isfile(os.path.join(workdir, name)) for name in ("config.json", "metrics.jsonl")):
            continue
        experiment, loss = _read(workdir)
        if first is None:
            first = workdir, experiment
        differences = [line for line in config_lib.differences(first[1], experiment) if line.startswith(_SAME)]
        if first[1].select_by != experiment.select_by:
            differences.append(f"evaluate.select_by: {first[1].select_by!r} -> {experiment.select_by!r}")
        if differences:
            raise UserError(f"--fit: {first[0]} and {workdir} are not comparable: {', '.join(differences)}")
        if loss is None:
            left_out.append(
                f"{workdir}: no validation {experiment.select_by} at its last step, {experiment.train.steps:,}"
            )
            continue
        tokens = float(sum(phase.steps * _tokens_of_step(phase.experiment) for phase in phases_of(experiment)))
        runs.append(Run(workdir, count_parameters(experiment.model)[1], tokens, loss))
    if first is None:
        raise UserError(f"--fit={pattern}: no matching folder has a config.json and a metrics.jsonl")
    if not (metric := first[1].select_by).partition("/")[0].endswith(_LOSSES):
        raise UserError(
            f"--fit={pattern}: these runs have config.evaluate.select_by={metric}; a fit needs a loss "
            f"({', '.join(_LOSSES)})"
        )
    return runs, first[1], left_out


def _tokens_of_step(experiment: Experiment) -> int:
    return experiment.train.global_batch_size * experiment.objective.lengths(experiment.data.sequence_length).raw


def _read(workdir: str) -> tuple[Experiment, float | None]:
    """Reads a run; returns (config, validation loss at the last step).

    The loss is the metric `config.evaluate.select_by`, or None for an unfinished run.

    Raises:
      UserError: the files in the workdir cannot be read.
    """
    try:
        experiment = config_lib.load(os.path.join(workdir, "config.json"))
        metric_lines = read_metrics(os.path.join(workdir, "metrics.jsonl"))
        last_lines = [x for x in metric_lines if x["split"] == "valid" and x["step"] == experiment.train.steps]
        losses = [x.get(experiment.select_by) for x in last_lines]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"--fit: {workdir} cannot be read: {type(e).__name__}: {e}") from e
    return experiment, losses[-1] if losses else None


def check_enough(pattern: str, runs: Sequence[Run]) -> None:
    """Raises UserError if the runs are too few to fit the law's five constants; the message says what is missing."""
    sizes, amounts = ({getattr(run, name) for run in runs} for name in ("parameters", "tokens"))
    max_amounts = max((len({r.tokens for r in runs if r.parameters == size}) for size in sizes), default=0)
    missing = [
        *([f"{MIN_RUNS - len(runs)} more runs"] if len(runs) < MIN_RUNS else []),
        *([f"{3 - len(sizes)} more sizes"] if len(sizes) < 3 else []),
        *([f"{3 - len(amounts)} more amounts of text"] if len(amounts) < 3 else []),
        *(["one size with two amounts of text"] if max_amounts < 2 else []),
    ]
    if missing:
        raise UserError(
            f"--fit={pattern}: {len(runs)} finished runs with {len(sizes)} sizes and {len(amounts)} amounts of text "
            f"are too few for {len(CONSTANTS)} constants; missing: {', '.join(missing)}"
        )


# --- the fit -------------------------------------------------------------------------------------------------------


class _Problem:
    """The minimization problem: min over t of sum Huber(log(exp(e) + exp(a - alpha n) + exp(b - beta d)) - log L).

    The variables are t = (e, a, alpha, b, beta). The method `constants` converts them to the law's constants. n is
    log N minus its mean over the runs, and d is log D minus its mean. If the means were not subtracted, a and alpha
    would be nearly collinear.
    """

    def __init__(self, parameters: np.ndarray, tokens: np.ndarray):
        n, d = np.log(parameters), np.log(tokens)
        self.n_mean, self.d_mean = n.mean(), d.mean()
        self.n, self.d = n - self.n_mean, d - self.d_mean

    def predict(self, t: np.ndarray) -> np.ndarray:
        """Computes the log L that the variables `t` predict for each run, [runs]."""
        return np.logaddexp.reduce(self._terms(t))

    def slope(self, t: np.ndarray) -> np.ndarray:
        """Computes the derivatives [runs, 5] of the predicted log L with respect to the variables `t`."""
        terms = self._terms(t)
        e, a, b = np.exp(terms - np.logaddexp.reduce(terms))
        return np.stack([e, a, -a * self.n, b, -b * self.d], axis=1)

    def _terms(self, t: np.ndarray) -> np.ndarray:
        return np.stack([np.full_like(self.n, t[0]), t[1] - t[2] * self.n, t[3] - t[4] * self.d])

    def descend(self, start: np.ndarray, log_loss: np.ndarray) -> optimize.OptimizeResult:
        """Minimizes the cost from one initial point and returns SciPy's result, which is a local minimum.

        Args:
          start: initial values of the variables `t`.
          log_loss: each run's log L, [runs].
        """
        upper = np.array([np.inf, np.inf, 3.0, np.inf, 3.0])
        lower = np.array([-np.inf, -np.inf, 0.0, -np.inf, 0.0])
        residuals = lambda t: self.predict(t) - log_loss  # noqa: E731
        return optimize.least_squares(residuals, start, self.slope, (lower, upper), loss="huber", f_scale=DELTA)

    def solve(self, log_loss: np.ndarray) -> np.ndarray:
        """Finds the variables `t` with the lowest cost, by minimizing from each of the STARTS best initial points."""
        initial_points = sorted(self._initial_points(log_loss), key=lambda t: np.abs(self.predict(t) - log_loss).sum())
        return min(
            (self.descend(start, log_loss) for start in initial_points[:STARTS]), key=lambda result: result.cost
        ).x

    def _initial_points(self, log_loss: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the initial points: a grid over four properties of the law.

        The properties are the fraction of the median loss that is due to E, the fraction of the rest that is due to N,
        alpha, and beta.
        """
        median, exponents = float(np.median(log_loss)), (0.1, 0.3, 0.5, 0.8, 1.2)
        for e_fraction, fraction, alpha, beta in itertools.product(
            (0.2, 0.5, 0.8), (0.2, 0.5, 0.8), exponents, exponents
        ):
            e, a, b = np.log([e_fraction, (1 - e_fraction) * fraction, (1 - e_fraction) * (1 - fraction)]) + median
            yield np.array([e, a, alpha, b, beta])

    def constants(self, t: np.ndarray) -> dict[str, float]:
        """Converts the variables `t` to the law's constants, as a dict with the keys E, A, alpha, B and beta."""
        e, a, alpha, b, beta = t
        return dict(
            E=math.exp(e),
            A=math.exp(a + alpha * self.n_mean),
            alpha=float(alpha),
            B=math.exp(b + beta * self.d_mean),
            beta=float(beta),
        )


def fit(runs: Sequence[Run], family: str, source: str, seed: int = 0) -> tuple[LossLaw, list[LossLaw]]:
    """Fits the law to runs; returns (the law, RESAMPLES laws from a bootstrap of the residuals).

    The bootstrap keeps each run's N and D, because the user chose these values, and draws the residual of its log L
    from the residuals of all runs. For n runs, the residuals are scaled by n / (n - 5), because a fit of five constants
    passes almost exactly through about five runs. On 20 synthetic sets of 20 runs with 0.3 % noise, the 95 % intervals
    contained A 16 times, alpha 17 times, E 18 times, and B, beta and the exponent of N_opt 20 times.

    Args:
      family: model family of the runs.
      source: description of the runs, stored in the law.
      seed: random seed of the bootstrap.
    """
    parameters, tokens, losses = (np.array([getattr(r, k) for r in runs], float) for k in Run._fields[1:])
    problem, log_loss = _Problem(parameters, tokens), np.log(losses)
    constants = problem.solve(log_loss)
    predicted = problem.predict(constants)
    scale = len(runs) / (len(runs) - len(CONSTANTS))
    residuals, rng = scale * (log_loss - predicted), np.random.default_rng(seed)

    def law(t: np.ndarray) -> LossLaw:
        return LossLaw(**problem.constants(t), source=source, with_embeddings=False, family=family)

    resampled = [
        law(problem.descend(constants, predicted + rng.choice(residuals, len(runs))).x) for _ in range(RESAMPLES)
    ]
    return law(constants), resampled


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Computes the (lower, upper) bounds of the interval that contains the central 95 % of the values."""
    low, high = np.quantile(values, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return float(low), float(high)


# --- the report ----------------------------------------------------------------------------------------------------


def fit_report(pattern: str, directory: str) -> str:
    """Fits the law to runs, writes law.json and law.png to `directory`, and returns tables that describe the fit.

    Args:
      pattern: glob that matches the runs' workdirs.

    Raises:
      UserError: there are too few runs, the runs are not comparable, or `directory` cannot be written.
    """
    runs, experiment, left_out = read_runs(pattern)
    check_enough(pattern, runs)
    parameters, tokens = (large_number(max(getattr(run, name) for run in runs)) for name in ("parameters", "tokens"))
    largest = f"{parameters} parameters and {tokens} tokens"
    source = f"fit of {len(runs)} runs of up to {largest}, {pattern}"
    law, resampled = fit(runs, experiment.model.family, source)
    law_fit = Fit(law, resampled, runs, left_out, experiment.select_by)
    try:
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, "law.json")
        write_atomically(path, json.dumps(_law_json(law_fit), indent=1) + "\n")
        from pretrainax.scaling.picture import draw_law  # a late import, because matplotlib imports slowly

        draw_law(os.path.join(directory, "law.png"), law, resampled, runs)
    except OSError as e:
        raise UserError(f"--to={directory} cannot be written: {e.strerror}") from e
    return f"{_tables(law_fit)}\n\nWrote {path} and law.png. To use this law for a budget: --flops=… --law={path}\n"


def _law_json(law_fit: Fit) -> dict[str, object]:
    """Builds the contents of law.json (see `power_laws.law_of`): the law's constants and intervals, and the runs."""
    law = law_fit.law
    return {
        "source": law.source,
        "family": law.family,
        "with_embeddings": law.with_embeddings,
        "metric": law_fit.metric,
        "constants": {name: getattr(law, name) for name in CONSTANTS},
        "intervals": {
            name: interval([getattr(x, name) for x in law_fit.resampled]) for name in (*CONSTANTS, "exponent")
        },
        "interval": COVERAGE,
        "runs": [run._asdict() for run in law_fit.runs],
        "left_out": law_fit.left_out,
    }


def _tables(law_fit: Fit) -> str:
    """Formats one table of the runs with their predicted losses and one of the law's constants with their intervals."""
    law, width = law_fit.law, max(len(run.workdir) for run in law_fit.runs)
    loss_width = max(len(law_fit.metric), 8)
    lines = [f"{'run':<{width}}  {'N':>8} {'D':>8} {law_fit.metric:>{loss_width}} {'law':>8}   error"]
    for run in law_fit.runs:
        predicted = law.loss(run.parameters, run.tokens)
        lines.append(
            f"{run.workdir:<{width}}  {large_number(run.parameters):>8} {large_number(run.tokens):>8} "
            f"{run.loss:{loss_width}.4f} {predicted:8.4f} {100 * (run.loss / predicted - 1):+5.2f} %"
        )
    lines += [f"left out: {line}" for line in law_fit.left_out]
    lines += ["", "L(N, D) = E + A / N^alpha + B / D^beta; N: parameters without embeddings, D: tokens of text"]
    for name in (*CONSTANTS, "exponent"):
        low, high = interval([getattr(x, name) for x in law_fit.resampled])
        label = "N_opt ∝ C^a, a" if name == "exponent" else name
        lines.append(f"  {label:<14} {getattr(law, name):10.4g}   {COVERAGE:.0%} of resamples: {low:.4g} to {high:.4g}")
    return "\n".join(lines)
