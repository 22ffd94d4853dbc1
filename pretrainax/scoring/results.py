"""Numbers that a model got: each with its standard error and what it was counted on, as a table and as a file."""

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
    """Holds a number, and the standard deviation of its error; None where that cannot be told."""

    value: float
    standard_error: Optional[float]

    def times(self, factor: float) -> "Estimate":
        error = self.standard_error
        return Estimate(factor * self.value, None if error is None else abs(factor) * error)


def ratio(sums: Sequence[float] | np.ndarray, counts: Sequence[float] | np.ndarray) -> Estimate:
    """Returns the sum of all over the count of all, with its standard error over the documents that are drawn.

    Documents with more tokens say more, and their number is drawn too: the ratio estimator of survey sampling (Cochran
    1977, Sampling Techniques, section 6.4). One document has no standard error; with counts of 1 it is that of a mean.

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
    """Holds one number that a model got."""

    source: str  # what it was asked: a source of text, a task
    measure: str  # "bits_per_byte"
    value: float
    standard_error: Optional[float]  # over documents, or questions; None: not known
    counts: dict[str, int]  # {"documents": 12, "tokens": 3400, …}, and what was left out
    how: str  # "left to right, …"
    part: str = ""  # of the source; "": all of it
    origin: str = ""  # of the model: "runs/mine, step 2,000"
    step: Optional[int] = None


def results_table(results: Sequence[Result]) -> str:
    """Returns a line for each result, what stands in the line before left out; below, how they were counted."""
    rows, before = [("", "", "value", "±", "of")], None
    for r in results:
        here = name_among(r, results), _counts(r)
        error = "" if r.standard_error is None else f"{r.standard_error:,.4f}"
        name, counts = here if here != before else ("", "")
        rows.append((name, r.measure, f"{r.value:,.4f}", error, counts))
        before = here
    if not any(name for name, *_ in rows):
        rows = [row[1:] for row in rows]
    return _framed(text_table(rows, "<" * (len(rows[0]) - 3) + ">><"), results)


def table_over_steps(results: Sequence[Result]) -> str:
    """Returns a line for each checkpoint, and for each source and part where there are several, a column a measure."""
    measures = list(dict.fromkeys(r.measure for r in results))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for r in results:
        error = "" if r.standard_error is None else f" ± {r.standard_error:,.4f}"
        lines.setdefault((f"{r.step:,}", name_among(r, results)), {})[r.measure] = f"{r.value:,.4f}{error}"
    rows = [(step, *(line.get(measure, "") for measure in measures), name) for (step, name), line in lines.items()]
    return _framed(text_table([("step", *measures, ""), *rows], ">" * (1 + len(measures)) + "<"), results)


def name_among(result: Result, among: Sequence[Result]) -> str:
    """Returns what tells the source and the part of a result from those of the others; empty where that is nothing."""
    source = result.source if len({r.source for r in among}) > 1 else ""
    part = result.part or ("all of it" if any(r.part for r in among if r.source == result.source) else "")
    return ": ".join(filter(None, (source, part)))


def _counts(result: Result) -> str:
    return ", ".join(f"{n:,} {name if n != 1 else name.removesuffix('s')}" for name, n in result.counts.items())


def _framed(table: str, results: Sequence[Result]) -> str:
    """Returns a table below what all its lines are of, and above how they were counted."""
    sources, how = (list(dict.fromkeys(getattr(r, name) for r in results)) for name in ("source", "how"))
    return "\n\n".join(filter(None, (sources[0] if len(sources) == 1 else "", table, "\n".join(how))))


def write_results(path: str, results: Sequence[Result]) -> str:
    """Writes the results as JSON, a list of an object each; returns a line about it, which says what was there before.

    A value that is no finite number becomes null.
    """
    there = os.path.exists(path)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    objects = [{name: _finite(value) for name, value in dataclasses.asdict(r).items()} for r in results]
    write_atomically(path, json.dumps(objects, indent=1, ensure_ascii=False) + "\n")
    return f"{len(results)} results in {path}" + (", in place of those that were there" if there else "")


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
