"""Estimates the difference of two arms of a study, with an interval over pretraining seeds and test records.

The unit is the pretraining seed. The arms are compared on the seeds that both have, and the value of a seed is the mean
over its downstream seeds. The difference of seed s on record r is the sum of the true difference and the effects of the
seed, of the record, and of the pair. All effects are random, because the verdict is about other seeds and about other
records of the same kind. The variance of the mean difference has two components:

- seeds: the variance over seeds, divided by their number. It includes the effects of pairs.
- records: the variance that all seeds share because they are scored on the same records. This is the variance over
  records of the mean over seeds, minus the part that the effects of pairs cause; at least 0.

Owen (2007), The pigeonhole bootstrap, derives this sum. tests/studies/test_contrasts.py measures how often the t
interval contains the true difference.
"""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.reporting.significance import ALPHA
from pretrainax.scoring.results import Estimate
from pretrainax.studies.outcomes import Outcome, Outcomes

# If the range of the differences over seeds, divided by the values of the arms, is smaller, rounding causes it.
_SAME = 1e-9


class Noise(NamedTuple):
    """The random errors of a difference that is measured with one seed; arrays have the same shape for many studies."""

    spread: float | np.ndarray  # standard deviation of the difference over seeds
    record_error: float | np.ndarray = 0.0  # standard error from the choice of test records, for any number of seeds
    record_degrees: float | np.ndarray = np.inf  # degrees of freedom of `record_error`

    def variance(self, seeds: int) -> float | np.ndarray:
        """Returns the variance of the mean difference over `seeds` seeds."""
        return np.square(self.spread) / seeds + np.square(self.record_error)

    def degrees(self, seeds: int) -> float | np.ndarray:
        """Returns the degrees of freedom of the t distribution, by Satterthwaite's approximation.

        The mean square of the estimated variance over n seeds is (n + 1) / (n - 1) times its square. With this factor,
        intervals of 2 and 3 seeds contain the true difference more often. If the spread over records is a third of the
        spread over seeds, they contain it in 91 and 94 % of studies instead of 87 and 92 %.
        """
        by_seeds = np.square(self.spread) / seeds
        if np.any(self.record_error):
            by_seeds = by_seeds * (seeds + 1) / (seeds - 1)
        by_records = np.square(self.record_error)
        squares = np.square(by_seeds) / (seeds - 1) + np.square(by_records) / self.record_degrees
        return np.square(by_seeds + by_records) / np.maximum(squares, np.finfo(float).tiny)


class Comparison(NamedTuple):
    """The difference of two arms; positive means that the first arm is better."""

    estimate: Estimate  # the difference with its 95 % interval
    noise: Optional[Noise]  # None: there are fewer than two seeds, or all differences are equal
    seeds: tuple[int, ...]  # pretraining seeds that both arms have
    unpaired: tuple[int, ...]  # pretraining seeds that one of the arms has, which are ignored
    differences: tuple[float, ...]  # difference of each seed
    records: int  # number of test records; 0: the measure of one of the arms has none


def compare(one: Outcomes, other: Outcomes, larger_is_better: bool) -> Comparison:
    """Estimates how much better the arm `one` is than the arm `other`.

    Args:
      one, other: the outcomes of the two arms, for the same measure and the same records.
      larger_is_better: direction of the measure.

    Raises:
      ValueError: two outcomes have different numbers of records.
    """
    sign = 1.0 if larger_is_better else -1.0
    seeds = tuple(sorted(seed for seed in one if seed in other))
    unpaired = tuple(sorted({*one, *other} - {*seeds}))
    if not seeds:
        return Comparison(Estimate(float("nan"), None), None, (), unpaired, (), 0)
    pairs = [(_mean(one[seed]), _mean(other[seed])) for seed in seeds]
    values = np.array([[a.value, b.value] for a, b in pairs])
    differences = sign * (values[:, 0] - values[:, 1])
    changes = [sign * (a.changes - b.changes) for a, b in pairs if a.changes is not None and b.changes is not None]
    has_records = len(changes) == len(seeds)
    influences = np.array(changes) if has_records else None
    estimate = Estimate(float(differences.mean()), None)
    records = 0 if influences is None else influences.shape[1]
    result = Comparison(estimate, None, seeds, unpaired, tuple(map(float, differences)), records)
    if len(seeds) < 2:
        return result
    noise = Noise(*map(float, noise_of(differences, influences, float(np.abs(values).max()))))
    if not noise.spread and not noise.record_error:
        return result
    error, degrees = float(np.sqrt(noise.variance(len(seeds)))), float(noise.degrees(len(seeds)))
    clusters = "pretraining seeds" + " and test records" * has_records
    estimate = Estimate(estimate.value, error, None, clusters, degrees)
    return result._replace(estimate=estimate._replace(interval=estimate.t_interval(ALPHA)), noise=noise)


def noise_of(differences: np.ndarray, changes: Optional[np.ndarray], scale: float) -> Noise:
    """Computes the components of the variance of the mean difference over n seeds, also of many studies at once.

    Args:
      differences: [..., n], n at least 2.
      changes: influence of each record on each difference, as in `Outcome.changes`, [..., n, R]. None: no records.
      scale: size of the values whose differences these are, for the limit of rounding errors.
    """
    seeds = differences.shape[-1]
    is_same = np.ptp(differences, axis=-1) <= _SAME * scale
    variance = np.where(is_same, 0.0, differences.var(axis=-1, ddof=1))
    if changes is None or changes.shape[-1] < 2:
        return Noise(np.sqrt(variance))
    records = changes.shape[-1]
    means = changes.mean(axis=-2)
    factor = (records - 1) / records  # factor of the jackknife variance
    squares = np.square(means).sum(axis=-1)
    by_record = factor * squares
    pairs = factor * np.square(changes - means[..., None, :]).sum(axis=(-2, -1)) / (seeds * (seeds - 1))
    # The differences of a discrete measure, for example an accuracy, can be equal by chance.
    variance = np.where(is_same, seeds * pairs, variance)
    shared = by_record - pairs
    shared = np.where(shared > _SAME * (by_record + variance / seeds), shared, 0.0)
    # A few records can have most of the influence. The variance of a sample variance follows from the kurtosis.
    kurtosis = records * np.power(means, 4).sum(axis=-1) / np.maximum(np.square(squares), np.finfo(float).tiny)
    degrees = np.clip(2 * records / np.maximum(kurtosis - 1, 0.01), 1, records - 1)
    # `shared` is a difference of two estimates, so it has fewer degrees of freedom than `by_record`.
    total = np.square(by_record) + np.square(pairs) / (seeds - 1)
    degrees = degrees * np.square(shared) / np.maximum(total, np.finfo(float).tiny)
    return Noise(np.sqrt(variance), np.sqrt(shared), np.where(shared > 0, degrees, np.inf))


def _mean(outcomes: Sequence[Outcome]) -> Outcome:
    """Returns the mean over downstream seeds."""
    changes = [outcome.changes for outcome in outcomes if outcome.changes is not None]
    value = float(np.mean([outcome.value for outcome in outcomes]))
    return Outcome(value, np.mean(changes, axis=0) if len(changes) == len(outcomes) else None)
