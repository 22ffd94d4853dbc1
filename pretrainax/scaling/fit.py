"""Fits L(N, D) = E + A / N^alpha + B / D^beta to your own runs: `python -m pretrainax.plan --fit=runs/*`.

The method is approach 3 of Hoffmann et al. 2022 (appendix D.2): it minimizes the Huber loss of log L, with a delta of
1e-3, from a grid of starting points. It uses only the last validation loss of finished runs. Halfway through a schedule
the learning rate is still high, and the loss is higher than in a run with a shorter schedule (section 3.1 there). The
loss is the metric that selects a run's model, such as the discriminator's loss of ELECTRA. N excludes embeddings. D is
the tokens of text that all steps read: repeated text counts again, and padding counts as text.

NOTE The paper uses L-BFGS. This module uses Gauss-Newton in a trust region, on the same cost with the same minimum. In
our comparison L-BFGS took more evaluations. It may stop too early if the cost is not scaled, as in the paper's own fit
(Besiroglu et al. 2024, section 4.1; recalled).
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
STARTS = 16  # starting points with the smallest error, of 225 in the grid; nearly all lead to one minimum
RESAMPLES = 400
COVERAGE = 0.95  # coverage of an interval
CONSTANTS = ("E", "A", "alpha", "B", "beta")
MIN_RUNS = 6  # minimum number of runs: one more than constants
# Fields that must agree, so that the losses of the runs are comparable.
_SAME = ("data.", "tokenizer", "objective", "model.family", "evaluate.objective", "evaluate.parameters")
_LOSSES = ("loss", "bits_per_token", "bits_per_byte")  # suffixes of the names of metrics in nats or bits


class Run(NamedTuple):
    workdir: str
    parameters: int  # without embeddings
    tokens: float
    loss: float  # metric `Fit.figure` of the last validation, in nats per target


class Fit(NamedTuple):
    law: LossLaw
    resampled: list[LossLaw]  # laws of the bootstrap
    runs: list[Run]
    left_out: list[str]  # excluded runs, one line each with the reason
    figure: str = "loss"  # the metric that the runs select checkpoints by


# --- runs ----------------------------------------------------------------------------------------------------------


def read_runs(pattern: str) -> tuple[list[Run], Experiment, list[str]]:
    """Reads the workdirs that match `pattern`; returns (finished runs, config of the first, reasons for exclusions).

    Raises:
      UserError: no workdir matches, or the losses of the runs are not comparable.
    """
    runs, left_out, first = [], [], None
    for workdir in sorted(glob.glob(os.path.expanduser(pattern))):
        if not all(os.path.isfile(os.path.join(workdir, name)) for name in ("config.json", "metrics.jsonl")):
            continue
        experiment, loss = _read(workdir)
        if first is None:
            first = workdir, experiment
        changed = [line for line in config_lib.differences(first[1], experiment) if line.startswith(_SAME)]
        if first[1].select_by != experiment.select_by:
            changed.append(f"evaluate.select_by: {first[1].select_by!r} -> {experiment.select_by!r}")
        if changed:
            raise UserError(f"--fit: {first[0]} and {workdir} are not comparable: {', '.join(changed)}")
        if loss is None:
            left_out.append(
                f"{workdir}: no validation {experiment.select_by} at its last step, {experiment.train.steps:,}"
            )
            continue
        tokens = float(sum(phase.steps * _tokens_of_step(phase.experiment) for phase in phases_of(experiment)))
        runs.append(Run(workdir, count_parameters(experiment.model)[1], tokens, loss))
    if first is None:
        raise UserError(f"--fit={pattern}: no matching folder has a config.json and a metrics.jsonl")
    if not (figure := first[1].select_by).partition("/")[0].endswith(_LOSSES):
        raise UserError(
            f"--fit={pattern}: these runs have config.evaluate.select_by={figure}; a fit needs a loss "
            f"({', '.join(_LOSSES)})"
        )
    return runs, first[1], left_out


def _tokens_of_step(experiment: Experiment) -> int:
    return experiment.train.global_batch_size * experiment.objective.lengths(experiment.data.sequence_length).raw


def _read(workdir: str) -> tuple[Experiment, float | None]:
    """Returns (config, loss of the last validation by `select_by`) of a run; None for the loss of an unfinished run."""
    try:
        experiment = config_lib.load(os.path.join(workdir, "config.json"))
        lines = read_metrics(os.path.join(workdir, "metrics.jsonl"))
        last = [x for x in lines if x["split"] == "valid" and x["step"] == experiment.train.steps]
        losses = [x.get(experiment.select_by) for x in last]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"--fit: {workdir} cannot be read: {type(e).__name__}: {e}") from e
    return experiment, losses[-1] if losses else None


def check_enough(pattern: str, runs: Sequence[Run]) -> None:
    """Raises UserError, with the missing runs, if the runs do not determine the five constants."""
    sizes, amounts = ({getattr(run, name) for run in runs} for name in ("parameters", "tokens"))
    most = max((len({r.tokens for r in runs if r.parameters == size}) for size in sizes), default=0)
    missing = [
        *([f"{MIN_RUNS - len(runs)} more runs"] if len(runs) < MIN_RUNS else []),
        *([f"{3 - len(sizes)} more sizes"] if len(sizes) < 3 else []),
        *([f"{3 - len(amounts)} more amounts of text"] if len(amounts) < 3 else []),
        *(["one size with two amounts of text"] if most < 2 else []),
    ]
    if missing:
        raise UserError(
            f"--fit={pattern}: {len(runs)} finished runs with {len(sizes)} sizes and {len(amounts)} amounts of text "
            f"are too few for {len(CONSTANTS)} constants; missing: {', '.join(missing)}"
        )


# --- the fit -------------------------------------------------------------------------------------------------------


class _Problem:
    """min over t of sum Huber(log(exp(e) + exp(a - alpha n) + exp(b - beta d)) - log L), t = (e, a, alpha, b, beta).

    n and d are log N and log D minus their means. Without this, a and alpha would be nearly collinear.
    """

    def __init__(self, parameters: np.ndarray, tokens: np.ndarray):
        n, d = np.log(parameters), np.log(tokens)
        self.n_mean, self.d_mean = n.mean(), d.mean()
        self.n, self.d = n - self.n_mean, d - self.d_mean

    def predict(self, t: np.ndarray) -> np.ndarray:
        """Returns log L, [runs]."""
        return np.logaddexp.reduce(self._terms(t))

    def slope(self, t: np.ndarray) -> np.ndarray:
        """Returns the gradient of log L with respect to t, [runs, 5]."""
        terms = self._terms(t)
        e, a, b = np.exp(terms - np.logaddexp.reduce(terms))
        return np.stack([e, a, -a * self.n, b, -b * self.d], axis=1)

    def _terms(self, t: np.ndarray) -> np.ndarray:
        return np.stack([np.full_like(self.n, t[0]), t[1] - t[2] * self.n, t[3] - t[4] * self.d])

    def descend(self, start: np.ndarray, log_loss: np.ndarray) -> optimize.OptimizeResult:
        """Returns the minimum near a starting point."""
        most = np.array([np.inf, np.inf, 3.0, np.inf, 3.0])
        least = np.array([-np.inf, -np.inf, 0.0, -np.inf, 0.0])
        off = lambda t: self.predict(t) - log_loss  # noqa: E731
        return optimize.least_squares(off, start, self.slope, (least, most), loss="huber", f_scale=DELTA)

    def solve(self, log_loss: np.ndarray) -> np.ndarray:
        """Returns the best minimum from the STARTS best starting points."""
        starts = sorted(self._starts(log_loss), key=lambda t: np.abs(self.predict(t) - log_loss).sum())
        return min((self.descend(start, log_loss) for start in starts[:STARTS]), key=lambda found: found.cost).x

    def _starts(self, log_loss: np.ndarray) -> Iterator[np.ndarray]:
        """Yields a grid of the share of E in the median loss, the share of N's term in the rest, and both exponents."""
        middle, exponents = float(np.median(log_loss)), (0.1, 0.3, 0.5, 0.8, 1.2)
        for fixed, share, alpha, beta in itertools.product((0.2, 0.5, 0.8), (0.2, 0.5, 0.8), exponents, exponents):
            e, a, b = np.log([fixed, (1 - fixed) * share, (1 - fixed) * (1 - share)]) + middle
            yield np.array([e, a, alpha, b, beta])

    def constants(self, t: np.ndarray) -> dict[str, float]:
        e, a, alpha, b, beta = t
        return dict(
            E=math.exp(e),
            A=math.exp(a + alpha * self.n_mean),
            alpha=float(alpha),
            B=math.exp(b + beta * self.d_mean),
            beta=float(beta),
        )


def fit(runs: Sequence[Run], family: str, source: str, seed: int = 0) -> tuple[LossLaw, list[LossLaw]]:
    """Returns (the law, laws of resampled residuals).

    The bootstrap keeps each run's N and D, which were chosen, and draws its residual of log L from all residuals. It
    scales residuals by n / (n - 5), because such a fit passes through about five runs exactly. On 20 synthetic sets of
    20 runs with 0.3 % of noise, the intervals of 95 % contained A 16 times, alpha 17, E 18, and B, beta and the
    exponent 20 times.
    """
    parameters, tokens, losses = (np.array([getattr(r, k) for r in runs], float) for k in Run._fields[1:])
    problem, log_loss = _Problem(parameters, tokens), np.log(losses)
    best = problem.solve(log_loss)
    predicted = problem.predict(best)
    wider = len(runs) / (len(runs) - len(CONSTANTS))
    residuals, rng = wider * (log_loss - predicted), np.random.default_rng(seed)

    def law(t: np.ndarray) -> LossLaw:
        return LossLaw(**problem.constants(t), source=source, with_embeddings=False, family=family)

    resampled = [law(problem.descend(best, predicted + rng.choice(residuals, len(runs))).x) for _ in range(RESAMPLES)]
    return law(best), resampled


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the ends of the central 95 % of the values."""
    low, high = np.quantile(values, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return float(low), float(high)


# --- the report ----------------------------------------------------------------------------------------------------


def fit_report(pattern: str, directory: str) -> str:
    """Fits the law, writes law.json and law.png into `directory`, and returns the tables.

    Raises:
      UserError: there are too few runs, or the runs are not comparable.
    """
    runs, experiment, left_out = read_runs(pattern)
    check_enough(pattern, runs)
    parameters, tokens = (large_number(max(getattr(run, name) for run in runs)) for name in ("parameters", "tokens"))
    most = f"{parameters} parameters and {tokens} tokens"
    source = f"fit of {len(runs)} runs of up to {most}, {pattern}"
    law, resampled = fit(runs, experiment.model.family, source)
    found = Fit(law, resampled, runs, left_out, experiment.select_by)
    try:
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, "law.json")
        write_atomically(path, json.dumps(_law_json(found), indent=1) + "\n")
        from pretrainax.scaling.picture import draw_law  # a late import, because matplotlib imports slowly

        draw_law(os.path.join(directory, "law.png"), law, resampled, runs)
    except OSError as e:
        raise UserError(f"--to={directory} cannot be written: {e.strerror}") from e
    return f"{_tables(found)}\n\nWrote {path} and law.png. To use this law for a budget: --flops=… --law={path}\n"


def _law_json(found: Fit) -> dict[str, object]:
    """Returns the JSON that `scaling.power_laws.law_of` reads, with its sources."""
    law = found.law
    return {
        "source": law.source,
        "family": law.family,
        "with_embeddings": law.with_embeddings,
        "figure": found.figure,
        "constants": {name: getattr(law, name) for name in CONSTANTS},
        "intervals": {name: interval([getattr(x, name) for x in found.resampled]) for name in (*CONSTANTS, "exponent")},
        "interval": COVERAGE,
        "runs": [run._asdict() for run in found.runs],
        "left_out": found.left_out,
    }


def _tables(found: Fit) -> str:
    law, width = found.law, max(len(run.workdir) for run in found.runs)
    loss = max(len(found.figure), 8)
    lines = [f"{'run':<{width}}  {'N':>8} {'D':>8} {found.figure:>{loss}} {'law':>8}   error"]
    for run in found.runs:
        predicted = law.loss(run.parameters, run.tokens)
        lines.append(
            f"{run.workdir:<{width}}  {large_number(run.parameters):>8} {large_number(run.tokens):>8} "
            f"{run.loss:{loss}.4f} {predicted:8.4f} {100 * (run.loss / predicted - 1):+5.2f} %"
        )
    lines += [f"left out: {line}" for line in found.left_out]
    lines += ["", "L(N, D) = E + A / N^alpha + B / D^beta; N: parameters without embeddings, D: tokens of text"]
    for name in (*CONSTANTS, "exponent"):
        low, high = interval([getattr(x, name) for x in found.resampled])
        label = "N_opt ∝ C^a, a" if name == "exponent" else name
        lines.append(f"  {label:<14} {getattr(law, name):10.4g}   {COVERAGE:.0%} of resamples: {low:.4g} to {high:.4g}")
    return "\n".join(lines)
