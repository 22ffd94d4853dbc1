"""Defines evaluation results with standard errors and counts; formats tables and writes JSON files."""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config.metric import metric_text
from pretrainax.files.atomic_files import write_atomically
from pretrainax.reporting.tables import text_table

# The splits of a source that --split names, and how results describe them
SPLITS = {"valid": "validation split", "train": "training split", "all": "both splits"}


class Estimate(NamedTuple):
    """A value and its standard error; the standard error is None if it is unknown."""

    value: float
    standard_error: Optional[float]

    def times(self, factor: float) -> "Estimate":
        error = self.standard_error
        return Estimate(factor * self.value, None if error is None else abs(factor) * error)


def ratio(sums: Sequence[float] | np.ndarray, counts: Sequence[float] | np.ndarray) -> Estimate:
    """Computes the ratio of totals, sum(`sums`) / sum(`counts`), and its standard error over D documents.

    The documents are a random sample, so both their sums and their counts are random. The standard error is therefore
    the error of the ratio estimator (Cochran 1977, Sampling Techniques, section 6.4). The standard error is None for a
    single document. If all counts are 1, the result is the mean of `sums` and its standard error.

    Args:
      sums, counts: numerator and denominator of each document, [D].
    """
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    total, documents = counts.sum(), len(counts)
    value = float(sums.sum() / total)
    if documents < 2:
        return Estimate(value, None)
    residuals = sums - value * counts
    return Estimate(value, float(math.sqrt(documents / (documents - 1) * np.square(residuals).sum()) / total))


@dataclasses.dataclass(frozen=True)
class Result:
    """The value of one metric of a model, such as the bits per byte on a data source."""

    source: str  # description of the evaluation data: a data source, or a task
    measure: str  # name of the metric: "bits_per_byte"
    value: float
    standard_error: Optional[float]  # over documents or questions; None if unknown
    counts: dict[str, int]  # {"documents": 12, "tokens": 3400, …}; includes counts of skipped items
    how: str  # evaluation method: "left to right, …"
    part: str = ""  # component or subset of the source; "": the whole source
    origin: str = ""  # description of the model: "runs/mine, step 2,000"
    step: Optional[int] = None  # training step of the checkpoint; None if there is none or it is irrelevant


def results_table(results: Sequence[Result]) -> str:
    """Formats results as a text table with one row per result, followed by the evaluation methods.

    The cells for the source and the counts are empty if their values are the same as in the previous row.
    """
    rows, previous = [("", "", "value", "±", "of")], None
    for r in results:
        labels = name_among(r, results), _format_counts(r)
        error = "" if r.standard_error is None else f"{r.standard_error:,.4f}"
        name, counts = labels if labels != previous else ("", "")
        rows.append((name, r.measure, metric_text(r.measure, r.value), error, counts))
        previous = labels
    if not any(name for name, *_ in rows):
        rows = [row[1:] for row in rows]
    return _add_captions(text_table(rows, "<" * (len(rows[0]) - 3) + ">><"), results)


def table_over_steps(results: Sequence[Result]) -> str:
    """Formats results as a text table with one row per checkpoint, source and part, and one column per metric.

    The evaluation methods follow the table.
    """
    measures = list(dict.fromkeys(r.measure for r in results))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for r in results:
        error = "" if r.standard_error is None else f" ± {r.standard_error:,.4f}"
        row = cells.setdefault((f"{r.step:,}", name_among(r, results)), {})
        row[r.measure] = f"{metric_text(r.measure, r.value)}{error}"
    rows = [(step, *(values.get(measure, "") for measure in measures), name) for (step, name), values in cells.items()]
    return _add_captions(text_table([("step", *measures, ""), *rows], ">" * (1 + len(measures)) + "<"), results)


def name_among(result: Result, among: Sequence[Result]) -> str:
    """Builds a label that tells a result apart from the others in `among`; "" if no label is needed.

    The label contains the source if `among` has several sources, and the part of the source if there are parts.
    """
    source = result.source if len({r.source for r in among}) > 1 else ""
    part = result.part or ("all of it" if any(r.part for r in among if r.source == result.source) else "")
    return ": ".join(filter(None, (source, part)))


def _format_counts(result: Result) -> str:
    return ", ".join(f"{n:,} {name if n != 1 else name.removesuffix('s')}" for name, n in result.counts.items())


def _add_captions(table: str, results: Sequence[Result]) -> str:
    """Adds the source above a table if all results share it, and the evaluation methods below the table."""
    sources, methods = (list(dict.fromkeys(getattr(r, name) for r in results)) for name in ("source", "how"))
    return "\n\n".join(filter(None, (sources[0] if len(sources) == 1 else "", table, "\n".join(methods))))


def write_results(path: str, results: Sequence[Result]) -> str:
    """Writes results to a JSON file as a list of objects; returns a message that contains the path.

    The message also says whether an existing file was overwritten. NaN and infinity are written as null.
    """
    is_overwritten = os.path.exists(path)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    objects = [{name: _finite_or_none(value) for name, value in dataclasses.asdict(r).items()} for r in results]
    write_atomically(path, json.dumps(objects, indent=1, ensure_ascii=False) + "\n")
    return f"{len(results)} results in {path}" + (", replacing the previous file" if is_overwritten else "")


def _finite_or_none(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
