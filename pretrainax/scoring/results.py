"""Defines evaluation results with confidence intervals and counts; formats tables and writes JSON files."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config.metric import metric_text
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.errors import counted
from pretrainax.reporting.significance import ALPHA, holm_levels, p_value, t_quantile
from pretrainax.reporting.tables import text_table

# The values of --split, and the descriptions of the splits in results.
SPLITS = {"valid": "validation split", "train": "training split", "all": "both splits"}


_WITHIN = ": for more text of the same documents; other documents may differ more"
# With fewer documents, the differences between documents are unknown: the interval of two documents is 13 standard
# errors wide.
MIN_DOCUMENTS = 3
_BLOCKS = 20  # number of blocks into which fewer documents are cut
_NORMAL_QUANTILE = 1.959964  # 97.5 % quantile of the normal distribution
_SAME = 1e-12  # a standard error below this multiple of its value consists of rounding errors: all clusters are equal


class Estimate(NamedTuple):
    """A value with its standard error and 95 % confidence interval; None if they are unknown."""

    value: float
    standard_error: Optional[float]
    interval: Optional[tuple[float, float]] = None
    clusters: str = ""  # the independent units from which the interval is computed, for example "documents"
    degrees: Optional[float] = (
        None  # degrees of freedom of the t distribution; None: the interval is normal or Wilson's
    )

    def times(self, factor: float) -> "Estimate":
        error, interval = self.standard_error, self.interval
        return self._replace(
            value=factor * self.value,
            standard_error=None if error is None else abs(factor) * error,
            interval=None if interval is None else tuple(sorted(factor * bound for bound in interval)),
        )

    def exp(self) -> "Estimate":
        """Returns the exponential of the value; the standard error is of first order, and the interval is exact."""
        value, error, interval = _exp(self.value), self.standard_error, self.interval
        return self._replace(
            value=value,
            standard_error=None if error is None else value * error,  # d exp(x) / dx = exp(x)
            interval=None if interval is None else (_exp(interval[0]), _exp(interval[1])),
        )

    def t_interval(self, alpha: float) -> Optional[tuple[float, float]]:
        """Returns the t interval of confidence 1 - `alpha`; None if the error or the degrees are unknown."""
        if self.standard_error is None or self.degrees is None:
            return None
        return _t_interval(self.value, self.standard_error, self.degrees, alpha)

    @property
    def p_value(self) -> float:
        """Returns the two-sided p-value of the hypothesis that the true value is 0; 1 if the error is unknown."""
        return p_value(self.value, self.standard_error, self.degrees)


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))  # float64 overflows above exp(709)


Numbers = Sequence[float] | np.ndarray
Sums = tuple[np.ndarray, np.ndarray]  # numerators and denominators of a metric, [n]


def ratio(sums: Numbers, counts: Numbers, documents: Optional[Numbers] = None, unit: str = "documents") -> Estimate:
    """Computes the ratio of totals, sum(`sums`) / sum(`counts`), with its error over documents.

    The documents are a random sample, so their sums and their counts are random. The standard error is that of the
    jackknife, and the interval is a t interval with Satterthwaite's degrees of freedom (Bell and McCaffrey 2002, Bias
    Reduction in Standard Errors): few of them if a few long documents dominate. If all counts are 1, these are the
    mean and its usual t interval. If all documents have the same ratio, the error is 0 and there is no interval.

    Fewer than MIN_DOCUMENTS documents are cut into blocks of consecutive units, which replace the documents. The
    interval then describes more text of the same documents, not other documents. The error is the error of a block
    bootstrap, in closed form. tests/scoring/test_coverage.py measures how often the intervals contain the true value.

    Args:
      sums, counts: numerator and denominator of each of n units (documents, or pieces of a document), [n].
      documents: document of each unit, [n]; the units of a document are in order. None: each unit is a document.
      unit: plural name of the documents.
    """
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    clusters, name = np.arange(len(sums)) if documents is None else np.asarray(documents), unit
    if documents is not None and len(np.unique(clusters[counts > 0])) < MIN_DOCUMENTS:
        clusters, name = _blocks(counts, clusters), f"blocks within {unit}"
    _, index = np.unique(clusters, return_inverse=True)
    sums, counts = np.bincount(index, sums), np.bincount(index, counts)
    return _over_clusters(*leave_one_out(sums, counts), name)


def ratio_difference(one: Sums, other: Sums, clusters: np.ndarray, unit: str = "records") -> Estimate:
    """Computes the difference of two ratios of totals (for example mean losses) of two models on the same n records.

    The error is as in `ratio`, for the paired difference. It is None for a single cluster.

    Args:
      one, other: numerators and denominators of each record, [n] each.
      clusters: the number of the cluster of each record; records of a cluster are dependent.
      unit: plural name of the clusters.
    """
    _, index = np.unique(clusters, return_inverse=True)
    changes = [leave_one_out(*(np.bincount(index, x) for x in sums)) for sums in (one, other)]
    (value, errors, shares), (other_value, other_errors, other_shares) = changes
    return _over_clusters(value - other_value, errors - other_errors, (shares + other_shares) / 2, unit)


def leave_one_out(sums: np.ndarray, counts: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Computes a ratio of totals, the change of the ratio without each cluster, and each cluster's share of the counts.

    Args:
      sums, counts: numerator and denominator of each cluster, [n]. If all counts are 0, the ratio is 0.
    """
    total = counts.sum() or 1.0
    value, shares = float(sums.sum() / total), counts / total
    rest = np.where(shares < 1, 1 - shares, np.inf)  # there is no ratio without the only cluster
    return value, (sums - value * counts) / rest / total, shares


def _over_clusters(value: float, errors: np.ndarray, shares: np.ndarray, name: str) -> Estimate:
    """Builds an estimate from the results of `leave_one_out`; `name` is the plural name of the clusters."""
    num = len(errors)
    if num < 2 or not 0 < shares.max() < 1:  # 0: no cluster has a count
        return Estimate(value, None)
    error = math.sqrt((num - 1) / num * np.square(errors).sum())
    odds = shares / (1 - shares)
    squares = np.square(odds)
    # Satterthwaite's approximation for independent clusters whose variance is proportional to their counts.
    degrees = odds.sum() ** 2 / (squares.sum() + squares.sum() ** 2 - np.square(squares).sum())
    if error <= _SAME * abs(value):
        return Estimate(value, 0.0, None, name, float(degrees))
    return Estimate(value, error, _t_interval(value, error, degrees), name, float(degrees))


def share(successes: Sequence[bool] | np.ndarray, unit: str = "examples") -> Estimate:
    """Computes the share of successes in n independent trials, with Wilson's interval (1927).

    The standard error is None if all trials have the same outcome, because the sample then contains no variance.

    Args:
      successes: outcome of each trial, bool [n].
      unit: plural name of the trials.
    """
    successes = np.asarray(successes, np.float64)
    value, num = float(successes.mean()), len(successes)
    error = None if value in (0, 1) else math.sqrt(value * (1 - value) / (num - 1))
    return Estimate(value, error, wilson(value, num), f"{unit} (Wilson)")


def wilson(value: float, trials: float) -> tuple[float, float]:
    """Computes Wilson's 95 % interval of a share.

    Args:
      trials: number of independent trials; not a whole number if it is an effective number.
    """
    z = _NORMAL_QUANTILE
    center = (value + z**2 / (2 * trials)) / (1 + z**2 / trials)
    width = z / (1 + z**2 / trials) * math.sqrt(value * (1 - value) / trials + z**2 / (4 * trials**2))
    return max(center - width, 0.0) if value else 0.0, min(center + width, 1.0) if value != 1 else 1.0


def paired_share(differences: Sequence[float] | np.ndarray) -> Estimate:
    """Computes the difference between two shares of successes in the same n trials, with its adjusted Wald interval.

    The interval adds 0.5 to each cell of the 2 × 2 table (Agresti and Min 2005, Statistics in Medicine 24), so its
    width is not zero if the outcomes of all trials are equal.

    Args:
      differences: outcome of the first minus outcome of the second in each trial, -1, 0 or 1, [n].
    """
    differences = np.asarray(differences, np.float64)
    trials, total, discordant = len(differences) + 2, differences.sum(), np.abs(differences).sum() + 1
    center, error = total / trials, math.sqrt(discordant - total**2 / trials) / trials
    bounds = center - _NORMAL_QUANTILE * error, center + _NORMAL_QUANTILE * error
    scale = trials / len(differences)  # factor from the adjusted to the unadjusted difference
    return Estimate(float(center * scale), error * scale, bounds, "examples (Agresti and Min)")


def jackknife(value: float, values_without: Sequence[float], records: int, is_share: bool) -> Estimate:
    """Computes the error of any metric of a sample of records from its values without each of G groups of records.

    The interval is a t interval. A share has Wilson's interval for the number of independent trials that have the same
    standard error, or `records` trials if the standard error is 0. If the error of a share is estimated from the G
    groups, the number of trials is smaller, so that the interval has the width of a t interval with G - 1 degrees of
    freedom (Korn and Graubard 1998; recalled). If each record is right or wrong, the error follows from the share.

    Args:
      value: metric of all records.
      values_without: metric of all records except one group, [G]; the groups have nearly equal sizes.
      records: number of independent records.
      is_share: whether the metric is a share of the records or of their parts.
    """
    groups, without = len(values_without), np.asarray(values_without, np.float64)
    if groups < 2 or not np.isfinite([value, *without]).all():
        return Estimate(value, None, wilson(value, records) if is_share and 0 <= value <= 1 else None, "records")
    error = math.sqrt((groups - 1) / groups * np.square(without - without.mean()).sum())
    if is_share and 0 <= value <= 1:
        trials = float(records)
        if error and 0 < value < 1:
            trials = value * (1 - value) / error**2
            if groups < records or not math.isclose(trials, records - 1):
                trials *= (_NORMAL_QUANTILE / t_quantile(groups - 1)) ** 2
        return Estimate(value, error or None, wilson(value, trials), "records (Wilson)")
    if not error:  # for example, an F1 of 1
        return Estimate(value, None)
    return Estimate(value, error, _t_interval(value, error, groups - 1), "records", groups - 1)


def _t_interval(value: float, error: float, degrees: float, alpha: float = ALPHA) -> tuple[float, float]:
    width = t_quantile(degrees, alpha) * error
    return value - width, value + width


def _blocks(counts: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Assigns units to about _BLOCKS blocks of equal counts, which do not cross documents; returns block numbers [n].

    Args:
      counts: count of each unit, [n].
      documents: document of each unit, [n].
    """
    blocks, num = np.zeros(len(counts), int), 0
    for document in np.unique(documents):
        rows = np.flatnonzero(documents == document)
        ends, total = np.cumsum(counts[rows]), counts[rows].sum()
        num_here = max(round(_BLOCKS * total / counts.sum()), 1)
        middles = (ends - counts[rows] / 2) / (total or 1)
        blocks[rows] = num + np.minimum((middles * num_here).astype(int), num_here - 1)
        num += num_here
    return blocks


@dataclasses.dataclass(frozen=True)
class Result:
    """The value of one metric of a model, for example the bits per byte on a data source."""

    source: str  # description of the evaluation data: a data source, or a task
    measure: str  # name of the metric: "bits_per_byte"
    value: float  # NaN if the model answered no example of a task
    standard_error: Optional[float]  # over documents or questions; None if unknown
    counts: dict[str, int]  # {"documents": 12, "tokens": 3400, …}; includes counts of skipped items
    how: str  # evaluation method: "left to right, …"
    part: str = ""  # component or subset of the source; "": the whole source
    origin: str = ""  # description of the model: "runs/mine, step 2,000"
    step: Optional[int] = None  # training step of the checkpoint; None if there is none or it is irrelevant
    interval: Optional[tuple[float, float]] = None  # 95 % confidence interval; None if unknown
    clusters: str = ""  # as in `Estimate`
    degrees: Optional[float] = None  # as in `Estimate`
    note: str = ""  # verdict of a comparison, and caveats


def results_table(results: Sequence[Result]) -> str:
    """Formats results as a text table with one row per result, followed by the evaluation methods.

    The cells for the source and the counts are empty if their values are the same as in the previous row.
    """
    rows, previous = [("", "", "value", "95 % interval", "of", "")], None
    for r in results:
        labels = name_among(r, results), _format_counts(r)
        name, counts = labels if labels != previous else ("", "")
        rows.append((name, r.measure, _format_value(r), format_interval(r), counts, r.note))
        previous = labels
    if not any(name for name, *_ in rows):
        rows = [row[1:] for row in rows]
    return _add_captions(text_table(rows, "<" * (len(rows[0]) - 4) + ">><<"), results)


def table_over_steps(results: Sequence[Result]) -> str:
    """Formats results as a text table with one row per checkpoint, source and part, and one column per metric.

    The evaluation methods follow the table.
    """
    measures = list(dict.fromkeys(r.measure for r in results))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for r in results:
        row = cells.setdefault((f"{r.step:,}", name_among(r, results)), {})
        interval = f"({text})" if (text := format_interval(r)) else ""
        row[r.measure] = " ".join(filter(None, (_format_value(r), interval, r.note)))
    rows = [(step, *(values.get(measure, "") for measure in measures), name) for (step, name), values in cells.items()]
    return _add_captions(text_table([("step", *measures, ""), *rows], ">" * (1 + len(measures)) + "<"), results)


def _format_value(result: Result) -> str:
    return "not asked" if result.counts.get("examples") == 0 else metric_text(result.measure, result.value)


def format_interval(result: Result) -> str:
    """Formats the 95 % interval of a result, or else its standard error; "" if both are unknown, or the error is 0."""
    if result.interval is None:
        return "" if not result.standard_error else f"± {result.standard_error:,.4f}"
    return " to ".join(metric_text(result.measure, bound) for bound in result.interval)


def with_verdicts(results: Sequence[Result]) -> list[Result]:
    """Adds to the note of each difference between models whether they are distinguishable at the 5 % level.

    Holm's method (1979) keeps the probability of one or more false verdicts among all differences below 5 %.
    """
    compared = [i for i, r in enumerate(results) if r.measure.endswith("_difference")]
    p_values, results = [_estimate(results[i]).p_value for i in compared], list(results)
    for i, p, level in zip(compared, p_values, holm_levels(p_values), strict=True):
        known = results[i].standard_error is not None
        verdict = "distinguishable" if p < level else "not distinguishable" if known else "error unknown"
        if len(p_values) > 1 and known:
            verdict += f" (Holm, {len(p_values)} comparisons)"
        results[i] = dataclasses.replace(results[i], note="; ".join(filter(None, (verdict, results[i].note))))
    return results


def _estimate(result: Result) -> Estimate:
    return Estimate(result.value, result.standard_error, result.interval, result.clusters, result.degrees)


def name_among(result: Result, among: Sequence[Result]) -> str:
    """Builds a label that distinguishes a result from the other results in `among`; "" if no label is needed.

    The label contains the source if `among` has several sources, and the part of the source if there are parts.
    """
    source = result.source if len({r.source for r in among}) > 1 else ""
    part = result.part or ("all of it" if any(r.part for r in among if r.source == result.source) else "")
    return ": ".join(filter(None, (source, part)))


def _format_counts(result: Result) -> str:
    return ", ".join(f"{n:,} {name if n != 1 else name.removesuffix('s')}" for name, n in result.counts.items())


def _add_captions(table: str, results: Sequence[Result]) -> str:
    """Adds the source above a table if all results share it, and below it the evaluation methods and the intervals."""
    sources, methods = (list(dict.fromkeys(getattr(r, name) for r in results)) for name in ("source", "how"))
    lines = [*methods, *interval_captions(results)]
    return "\n\n".join(filter(None, (sources[0] if len(sources) == 1 else "", table, "\n".join(lines))))


def interval_captions(results: Iterable[Result]) -> list[str]:
    """Describes the intervals of results, one line per kind of interval; several kinds name their metrics."""
    kinds: dict[str, dict[str, None]] = {}
    for r in results:
        if r.interval and r.clusters:
            kind = f"95 % {'' if r.degrees is None else 't '}intervals over {r.clusters}"
            kinds.setdefault(kind + _WITHIN * ("within" in r.clusters), {})[r.measure] = None
    return [", ".join(measures) + ": " + kind if len(kinds) > 1 else kind for kind, measures in kinds.items()]


def write_results(path: str, results: Sequence[Result]) -> str:
    """Writes results to a JSON file as a list of objects; returns a message that contains the path.

    The message also states if an existing file was overwritten. NaN and infinity are written as null.
    """
    is_overwritten = os.path.exists(path)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    objects = [{name: _finite_or_none(value) for name, value in dataclasses.asdict(r).items()} for r in results]
    write_atomically(path, json.dumps(objects, indent=1, ensure_ascii=False) + "\n")
    return f"{counted(len(results), 'result')} in {path}" + (", replacing the previous file" if is_overwritten else "")


def _finite_or_none(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
