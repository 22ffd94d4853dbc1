"""Computes the signal-to-noise ratio of a metric, which shows if the metric can rank models.

Heineman et al. (2025, Signal and Noise, arXiv 2508.13144, recalled) define the ratio: the spread between models
over the spread over the last checkpoints of a run. This module also uses the spread over seeds, and tests the ratio.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config.metric import reported
from pretrainax.reporting.significance import ALPHA

LAST = 5  # number of last checkpoints of a run from which the noise is computed
_MIN_CHECKPOINTS = 4  # fewer values around a line have at most one degree of freedom


class SignalToNoise(NamedTuple):
    """The signal and the noise of a metric, in its unit."""

    signal: float  # best minus worst mean of a model over its seeds
    noise: float  # standard deviation of the mean of a model: `seeds` / sqrt(number of seeds), or else `checkpoints`
    checkpoints: Optional[float]  # standard deviation over the last checkpoints of a run, around a line
    seeds: Optional[float]  # standard deviation over the seeds of a model
    p_value: float  # probability that noise gives equal models this signal or more (Tukey's test of the range)

    @property
    def ratio(self) -> float:
        return self.signal / self.noise if self.noise else math.inf if self.signal else 0.0

    @property
    def decides(self) -> bool:
        """Returns True if noise alone would give equal models this signal in less than ALPHA of cases."""
        return self.p_value < ALPHA

    def note(self, metric: str) -> str:
        """Describes a metric that cannot rank the models."""
        return (
            f"{metric}: in parentheses, because noise can explain its differences: the best and the worst setting "
            f"differ by {reported(metric, self.signal)}, as equal settings do in {self.p_value:.0%} of cases "
            f"(signal-to-noise ratio {self.ratio:.1f}; noise over {'seeds' if self.seeds else 'the last validations'})"
        )


def last_values(lines: Sequence[Mapping], metric: str) -> list[float]:
    """Returns a metric of the last LAST validations of a run.

    Args:
      lines: the lines of metrics.jsonl.
    """
    values = [line[metric] for line in lines if line["split"] == "valid" and line.get(metric) is not None]
    return values[-LAST:]


def signal_to_noise(models: Sequence[Sequence[Sequence[float]]]) -> Optional[SignalToNoise]:
    """Computes the signal and the noise of a metric.

    The last checkpoint gives the value of a run. Noise over checkpoints leaves out what differs between seeds, so
    it is used only if each model has a single seed.

    Args:
      models: the values of the last checkpoints of each seed of each model; models and runs without values are ignored.

    Returns:
      The signal and the noise; None for fewer than two models, or if the noise is unknown.
    """
    models = [runs for runs in ([run for run in runs if len(run)] for runs in models) if runs]
    if len(models) < 2:
        return None
    finals = [np.array([run[-1] for run in runs], np.float64) for runs in models]
    checkpoints, of_checkpoints = _pooled([_residuals(run) for runs in models for run in runs], 2)
    seeds, of_seeds = _pooled([values - values.mean() for values in finals], 1)
    noise, degrees = checkpoints, of_checkpoints
    if seeds is not None:
        noise, degrees = seeds / math.sqrt(min(map(len, finals))), of_seeds
    if noise is None:
        return None
    from scipy.stats import studentized_range  # local import, because it takes 0.5 s

    signal = float(np.ptp([values.mean() for values in finals]))
    p_value = float(studentized_range.sf(signal / noise, len(models), degrees)) if noise else float(signal == 0)
    return SignalToNoise(signal, noise, checkpoints, seeds, p_value)


def _residuals(values: Sequence[float]) -> np.ndarray:
    """Returns the deviations of a curve from its line, [n]; [0] for fewer than _MIN_CHECKPOINTS values."""
    steps = np.arange(len(values))
    if len(values) < _MIN_CHECKPOINTS:
        return np.zeros(0)
    return np.asarray(values, np.float64) - np.polyval(np.polyfit(steps, values, 1), steps)


def _pooled(deviations: Sequence[np.ndarray], fitted: int) -> tuple[Optional[float], int]:
    """Computes the pooled standard deviation and its degrees of freedom; each array has `fitted` fewer of them."""
    degrees = sum(max(len(x) - fitted, 0) for x in deviations)
    return (math.sqrt(sum(np.square(x).sum() for x in deviations) / degrees) if degrees else None), degrees
