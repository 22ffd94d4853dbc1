"""Checks whether a law has the form of its runs: the test for lack of fit, and a prediction within the runs.

Intervals assume that the law is true. If the losses follow another law, the intervals are too narrow: a law of 40 runs
of a BERT had narrow intervals for all constants, and its prediction was 10 % too high (docs/studies/index.md). The
smallest models and the shortest runs deviate most.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from scipy import stats

from pretrainax.scaling.law_fit import fit, measures_repetition
from pretrainax.scaling.law_intervals import best_fit, prediction_interval
from pretrainax.scaling.power_laws import CONSTANTS, LossLaw, Run

LEVEL = 1e-3  # level of the test for lack of fit
RATIO = 8  # FLOPs of the largest runs, as a multiple of the FLOPs of the runs that predict them
COVERAGE = 0.99  # coverage of the interval of this prediction
_MIN_RUNS = 2 * len(CONSTANTS)


def smaller_windows(runs: Sequence[Run]) -> list[list[Run]]:
    """Lists subsets of the runs, without some of the smallest sizes or amounts of text; the largest subset is first.

    At least three sizes and three amounts remain. If two subsets have the same number of runs, the subset with more
    sizes is first. Amounts of text that differ by less than 5 %, because steps are whole, count as equal.
    """
    sizes, amounts = sorted({run.parameters for run in runs}), [0.0]
    for tokens in sorted({run.tokens for run in runs}):
        amounts += [tokens] if tokens > 1.05 * amounts[-1] else []
    least = itertools.product(sizes[:-2], amounts[1:-2])  # sizes change last, so that more sizes are first
    found = [[run for run in runs if run.parameters >= size and run.tokens >= tokens] for size, tokens in least]
    return sorted((window for window in found if _MIN_RUNS <= len(window) < len(runs)), key=len, reverse=True)


def form_problems(law: LossLaw) -> Iterator[str]:
    """Yields one line for each check that a fitted law fails; `law` must have its runs."""
    yield from _lack_of_fit(law)
    yield from _failed_prediction(law)


def _lack_of_fit(law: LossLaw) -> Iterator[str]:
    """Yields a line if the runs differ from the law by more than equal runs with other seeds differ.

    This is the F test for lack of fit (Fisher 1922; recalled) with the errors of log L. Without runs of equal sizes and
    tokens, there is no test.
    """
    problem, t, _ = best_fit(law)
    cells, index = np.unique(
        [(run.parameters, run.tokens, run.epochs) for run in law.runs], axis=0, return_inverse=True
    )
    pure_freedom, lack_freedom = len(law.runs) - len(cells), len(cells) - problem.size
    if pure_freedom < 1 or lack_freedom < 1:
        return
    in_cell = (index.reshape(-1, 1) == np.arange(len(cells))).astype(float)  # [runs, cells]
    means = problem.whitening @ in_cell
    losses = problem.whitening @ problem.log_loss
    pure = np.square(losses - means @ np.linalg.lstsq(means, losses)[0]).sum() / pure_freedom
    lack = (np.square(problem.errors(t, problem.log_loss)).sum() - pure_freedom * pure) / lack_freedom
    p_value = float(stats.f.sf(lack / max(pure, 1e-16), lack_freedom, pure_freedom))
    if p_value < LEVEL:
        error = np.square(problem.predict(t) - problem.log_loss).mean() ** 0.5
        deviations = problem.log_loss - in_cell @ (problem.log_loss @ in_cell / in_cell.sum(0))
        yield (
            f"the runs differ from the law by {100 * error:.2g} %, and equal runs with other seeds by "
            f"{100 * (np.square(deviations).sum() / pure_freedom) ** 0.5:.2g} % (p = {p_value:.1g})"
        )


def _failed_prediction(law: LossLaw) -> Iterator[str]:
    """Yields a line if a law of the small runs does not predict the largest runs."""
    largest = max(map(_work, law.runs))
    small = [run for run in law.runs if _work(run) <= largest / RATIO]
    large = [run for run in law.runs if _work(run) >= 0.99 * largest]
    if len(small) < _MIN_RUNS:
        return
    repeats = law.repetition is not None and measures_repetition(small)
    one, measured = large[0], float(np.mean([run.loss for run in large]))
    of_small = fit(small, law.family, law.source, law.metric, repeats)
    low, high = prediction_interval(of_small, one.parameters, one.tokens, one.epochs, COVERAGE)
    if not low <= measured <= high:
        yield (
            f"a law of the {len(small)} runs with at most 1/{RATIO} of the FLOPs predicts a loss of {low:.3f} to "
            f"{high:.3f} for the largest runs, which have {measured:.3f}"
        )


def _work(run: Run) -> float:
    return run.parameters * run.tokens
