"""Computes the difference of any metric between two models on the same records, with its bootstrap error."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from pretrainax.reporting.significance import ALPHA
from pretrainax.scoring.results import Estimate

T = TypeVar("T")
RESAMPLES = 200  # resamples of a bootstrap, whose standard error then has a relative error of 5 %
_MIN_RESAMPLES, _MAX_SECONDS = 25, 30.0  # after this time, the bootstrap ends, but not before this number of resamples


def resampled_gain(metric: Callable[[T, np.ndarray], float], pair: tuple[T, T], clusters: np.ndarray) -> Estimate:
    """Computes the difference of a metric, with its standard error from a bootstrap over clusters and a t interval.

    The same clusters are drawn for both models. The standard error is None for a single cluster. For a mean over n
    clusters, it equals the usual standard error: the spread of resamples is smaller by the factor sqrt(1 - 1 / n).

    Args:
      metric: computes the metric of one of the `pair`, for the records with the given indices.
      clusters: the number of the cluster of each of the n records; records of a cluster stay together.
    """
    model, baseline = pair
    order = np.argsort(clusters, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(clusters[order])) + 1)
    everything = np.arange(len(clusters))
    value = metric(model, everything) - metric(baseline, everything)
    if len(groups) < 2:
        return Estimate(value, None)
    rng, differences, started = np.random.default_rng(0), [], time.perf_counter()
    for count in range(RESAMPLES):
        if count >= _MIN_RESAMPLES and time.perf_counter() - started > _MAX_SECONDS:
            break
        drawn = np.concatenate([groups[i] for i in rng.integers(len(groups), size=len(groups))])
        differences.append(metric(model, drawn) - metric(baseline, drawn))
    degrees = len(groups) - 1
    error = float(np.std(differences, ddof=1)) * math.sqrt(len(groups) / degrees)
    estimate = Estimate(float(value), error, None, "records", degrees)
    return estimate._replace(interval=estimate.t_interval(ALPHA) if error else None)
