"""Evaluation results with standard errors and counts, as tables and as JSON files."""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.files.atomic_files import write_atomically
from pretrainax.reporting.tables import text_table


class Estimate(NamedTuple):
    """A value and its standard error; None if the error is unknown."""

    value: float
    standard_error: Optional[float]

    def times(self, factor: float) -> "Estimate":
        error = self.standard_error
        return Estimate(factor * self.value, None if error is None else abs(factor) * error)


def ratio(sums: Sequence[float] | np.ndarray, counts: Sequence[float] | np.ndarray) -> Estimate:
    """Returns the sum of `sums` over the sum of `counts`, with its standard error over sampled documents.

    Longer documents have more weight, and their lengths are random too: this is the ratio estimator of survey sampling
    (Cochran 1977, Sampling Techniques, section 6.4). One document has no standard error. With counts of 1 the result is
    a mean and its standard error.

    Args:
      sums, counts: of each document, [D].
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
    """One measured value of a model."""

    source: str  # the evaluation data: a source of text, or a task
    measure: str  # "bits_per_byte"
    value: float
    standard_error: Optional[float]  # over documents or questions; None: unknown
    counts: dict[str, int]  # {"documents": 12, "tokens": 3400, …}, and counts of skipped items
    how: str  # "left to right, …"
    part: str = ""  # of the source; "": the whole source
    origin: str = ""  # of the model: "runs/mine, step 2,000"
    step: Optional[int] = None


def results_table(results: Sequence[Result]) -> str:
    """Returns a table with a row for each result, without repeated cells, and below it the methods of measurement."""
    rows, previous = [("", "", "value", "±", "of")], None
    for r in results:
        labels = name_among(r, results), _counts(r)
        error = "" if r.standard_error is None else f"{r.standard_error:,.4f}"
        name, counts = labels if labels != previous else ("", "")
        rows.append((name, r.measure, f"{r.value:,.4f}", error, counts))
        previous = labels
    if not any(name for name, *_ in rows):
        rows = [row[1:] for row in rows]
    return _framed(text_table(rows, "<" * (len(rows[0]) - 3) + ">><"), results)


def table_over_steps(results: Sequence[Result]) -> str:
    """Returns a table with a row for each checkpoint, source and part, and a column for each measure."""
    measures = list(dict.fromkeys(r.measure for r in results))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for r in results:
        error = "" if r.standard_error is None else f" ± {r.standard_error:,.4f}"
        lines.setdefault((f"{r.step:,}", name_among(r, results)), {})[r.measure] = f"{r.value:,.4f}{error}"
    rows = [(step, *(line.get(measure, "") for measure in measures), name) for (step, name), line in lines.items()]
    return _framed(text_table([("step", *measures, ""), *rows], ">" * (1 + len(measures)) + "<"), results)


def name_among(result: Result, among: Sequence[Result]) -> str:
    """Returns the source and part of a result, as far as they differ among the results; "" if they do not differ."""
    source = result.source if len({r.source for r in among}) > 1 else ""
    part = result.part or ("all of it" if any(r.part for r in among if r.source == result.source) else "")
    return ": ".join(filter(None, (source, part)))


def _counts(result: Result) -> str:
    return ", ".join(f"{n:,} {name if n != 1 else name.removesuffix('s')}" for name, n in result.counts.items())


def _framed(table: str, results: Sequence[Result]) -> str:
    """Returns a table with the common source of all results above it and the methods of measurement below."""
    sources, how = (list(dict.fromkeys(getattr(r, name) for r in results)) for name in ("source", "how"))
    return "\n\n".join(filter(None, (sources[0] if len(sources) == 1 else "", table, "\n".join(how))))


def write_results(path: str, results: Sequence[Result]) -> str:
    """Writes the results as a JSON list of objects; returns a message that mentions an overwritten file.

    Values that are not finite become null.
    """
    is_overwritten = os.path.exists(path)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    objects = [{name: _finite(value) for name, value in dataclasses.asdict(r).items()} for r in results]
    write_atomically(path, json.dumps(objects, indent=1, ensure_ascii=False) + "\n")
    return f"{len(results)} results in {path}" + (", replacing the previous file" if is_overwritten else "")


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
