"""Compares settings by the differences of their runs with equal seeds, and names a best setting only beyond chance.

The setting with the best mean is the leader. Each other setting is compared with the leader by a t interval of the
paired differences. The confidence of the intervals is 95 % for all comparisons together (Holm 1979): the interval of
the i-th most significant of m differences has the level 1 - 0.05 / (m - i + 1), and no interval after the first that
contains 0 is narrower. The leader is the best setting only if no interval contains 0. If all settings are equal, this
happens in at most 5 % of cases for two settings, and in fewer for more settings.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config.metric import declared, reported
from pretrainax.reporting.significance import ALPHA, holm_levels, p_value, t_quantile

_MAX_SEEDS = 1000  # larger numbers of seeds are not estimated
_SAME = 1e-9  # differences whose relative range is smaller are equal: the rest is rounding
_WITHOUT_SEEDS = (3, 5)  # numbers of seeds whose smallest visible difference a verdict on single seeds prints

Values = Mapping[Hashable, float]  # {seed: value of the metric}


class Difference(NamedTuple):
    """The mean difference of a setting from the leader over shared seeds, and the half-width of its interval."""

    mean: float
    half_width: Optional[float]  # None: unknown, because there are less than two seeds or all differences are equal
    seeds: int
    level: float = ALPHA  # of the interval

    @property
    def is_distinguishable(self) -> bool:
        return self.half_width is not None and abs(self.mean) > self.half_width

    def text(self, metric: str) -> str:
        """Formats the difference with its interval: "+0.0200 ± 0.0310"."""
        return f"{'-' if self.mean < 0 else '+'}{with_interval(metric, abs(self.mean), self.half_width)}"

    def cell(self, metric: str) -> str:
        """Formats the difference for a table, with "not distinguishable" if its interval contains 0."""
        return self.text(metric) + ("" if self.is_distinguishable else ", not distinguishable")

    def to_json(self) -> dict:
        return self._asdict() | {"is_distinguishable": self.is_distinguishable}


class Ranking(NamedTuple):
    """The comparison of several settings."""

    leader: int  # index of the setting with the best mean
    differences: tuple[Optional[Difference], ...]  # of each setting from the leader; None: the leader itself
    best: Optional[int]  # the leader, if it is distinguishable from all other settings
    text: str  # one line for the user: the best setting, or why none is the best


def rank(
    metric: str, labels: Sequence[str], values: Sequence[Values], selection: Optional[Sequence[Values]] = None
) -> Ranking:
    """Compares at least two settings, each of which has at least one value.

    Args:
      metric: name of the metric, for its format and direction.
      labels: names of the settings.
      values: the values of each setting by seed, which the result reports.
      selection: values on other data, whose means select the leader. None: `values`.
    """
    larger = declared(metric).larger_is_better
    means = [float(np.mean(list(setting.values()))) for setting in selection or values]
    leader = (max if larger else min)(range(len(means)), key=means.__getitem__)
    others = [i for i in range(len(values)) if i != leader]
    found = dict(zip(others, _differences([values[i] for i in others], values[leader]), strict=True))
    differences = tuple(found.get(i) for i in range(len(values)))
    is_worse = lambda one: one.is_distinguishable and (one.mean < 0) == larger  # noqa: E731
    closest = min(others, key=lambda i: (is_worse(found[i]), abs(found[i].mean) / (found[i].half_width or math.inf)))
    name = metric.replace("_", " ")
    if is_worse(found[closest]):
        best = f"{labels[leader]}, {with_interval(metric, *mean_interval(list(values[leader].values())))}"
        text = f"best {name}: {best}; next: {labels[closest]}, {found[closest].text(metric)}"
        return Ranking(leader, differences, leader, text)
    reason = _reason(metric, [labels[leader], labels[closest]], found[closest], [values[leader], values[closest]])
    return Ranking(leader, differences, None, f"no best {name}: {reason}")


def mean_interval(values: Sequence[float], alpha: float = ALPHA) -> tuple[float, Optional[float]]:
    """Returns the mean of values and the half-width of its t interval; None for a single value or equal values."""
    error = _standard_error(values)
    return float(np.mean(values)), None if error is None else t_quantile(len(values) - 1, alpha) * error


def _standard_error(values: Sequence[float]) -> Optional[float]:
    if len(values) < 2 or np.ptp(values) <= _SAME * np.max(np.abs(values)):
        return None
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def with_interval(metric: str, mean: float, half_width: Optional[float]) -> str:
    """Formats a mean and its interval: "3.1415 ± 0.0120", or only the mean if the interval is unknown."""
    return reported(metric, mean) + ("" if half_width is None else f" ± {reported(metric, half_width)}")


def _differences(settings: Sequence[Values], leader: Values) -> list[Difference]:
    """Computes the difference of each setting from the leader, with Holm's simultaneous intervals."""
    pairs = [[setting[seed] - leader[seed] for seed in setting if seed in leader] for setting in settings]
    means = [float(np.mean(list(setting.values())) - np.mean(list(leader.values()))) for setting in settings]
    p_values = [p_value(float(np.mean(x)) if x else 0.0, _standard_error(x), len(x) - 1) for x in pairs]
    differences = []
    for values, mean, level in zip(pairs, means, holm_levels(p_values), strict=True):
        interval = mean_interval(values, level) if values else (mean, None)
        differences.append(Difference(*interval, len(values), level))
    return differences


def _reason(metric: str, labels: Sequence[str], closest: Difference, values: Sequence[Values]) -> str:
    """Explains why the leader is not the best setting.

    Args:
      labels, values: of the leader and of the setting that is closest to it.
    """
    if closest.seeds < 2:
        sizes = ", and ".join(f"{_visible(count):.1f} with {count} seeds" for count in _WITHOUT_SEEDS)
        return (
            f"{labels[0]} and {labels[1]} share {'one seed' if closest.seeds else 'no seed'}, a verdict takes at least "
            f"two; the smallest visible difference, in standard deviations over seeds, is {sizes}"
        )
    difference = f"{closest.text(metric)} over {closest.seeds} seeds"
    if closest.is_distinguishable:
        return f"{labels[0]} was selected, but {labels[1]} is better on the rows of the report ({difference})"
    if closest.half_width is None:
        return f"{labels[0]} and {labels[1]} differ equally for each seed ({difference}), so there is no interval"
    reason = f"{labels[0]} and {labels[1]} are not distinguishable ({difference})"
    deltas = [values[1][seed] - values[0][seed] for seed in values[1] if seed in values[0]]
    ratio = abs(closest.mean) / float(np.std(deltas, ddof=1))
    needed = next((n for n in range(2, _MAX_SEEDS) if _visible(n, closest.level) < ratio), None)
    more = f"about {needed} seeds" if needed else f"more than {_MAX_SEEDS:,} seeds"
    return f"{reason}; a difference of this size takes {more}"


def _visible(count: int, level: float = ALPHA) -> float:
    """Returns the smallest distinguishable mean of `count` differences, in standard deviations."""
    return t_quantile(count - 1, level) / math.sqrt(count)
