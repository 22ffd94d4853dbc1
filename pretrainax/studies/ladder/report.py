"""Writes the report of a ladder: report.md and report.json, next to law.json and law.png."""

import json
import os
from collections.abc import Iterator
from typing import Optional

from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.tables import markdown
from pretrainax.reporting.units import large_number
from pretrainax.scaling.fit import LAW_PNG, Fit, law_json
from pretrainax.scaling.law_intervals import COVERAGE, PREDICTION_COVERAGE
from pretrainax.studies.ladder.ladder import Ladder
from pretrainax.studies.ladder.rungs import Rungs


def write_report(workdir: str, ladder: Ladder, rungs: Rungs, law_fit: Fit, score: Optional[JsonObject]) -> str:
    """Writes the report of a ladder, and returns its Markdown text.

    Args:
      score: content of score.json; None: the ladder has no held-out run.
    """
    text = "\n\n".join(_sections(ladder, rungs, law_fit, score)) + "\n"
    content = {"law": law_json(law_fit), "score": score, "flops": sum(rung.new_flops for rung in rungs.runs)}
    write_atomically(os.path.join(workdir, "report.md"), text)
    write_atomically(os.path.join(workdir, "report.json"), json.dumps(content, indent=1) + "\n")
    return text


def _sections(ladder: Ladder, rungs: Rungs, law_fit: Fit, score: Optional[JsonObject]) -> Iterator[str]:
    law, found = law_fit.law, law_fit.intervals
    yield f"# Ladder of {ladder.config}"
    if score is not None:
        yield _score_line(score)
    yield f"{law.metric} = E + A / N^alpha + B / D^beta. N: parameters without embeddings, D: tokens of text."
    names = {"exponent": "a of N_opt ∝ C^a", "repetition": "R* of repeated text"}
    rows = [(names.get(name, name), f"{getattr(law, name):.4g}", str(interval)) for name, interval in found.of.items()]
    yield markdown(("constant", "value", f"{COVERAGE:.0%} interval"), rows).rstrip()
    widens = ", which widens the intervals" if law.correlation else ""
    yield (
        f"One run has a standard deviation of {100 * found.noise:.2g} % of its loss around the law. The errors of the "
        f"branches of one trunk have an estimated correlation of {law.correlation:g}{widens}."
    )
    if law_fit.repetition:
        yield f"The law has no term for repeated text: {law_fit.repetition}."
    if law.unidentified:
        yield "The runs do not determine the law, and `plan --law` refuses it:"
        yield "\n".join(f"- {line}" for line in law.unidentified)
    yield _run_table(law_fit)
    if law_fit.left_out:
        yield "Runs left out:\n\n" + "\n".join(f"- {line}" for line in law_fit.left_out)
    yield "Intervals are profile-likelihood intervals with the F distribution."
    yield f"![law]({LAW_PNG})"


def _score_line(score: JsonObject) -> str:
    low, high = score["interval"]
    place = "inside" if score["is_in_interval"] else "OUTSIDE"
    return (
        f"The held-out run has {score['metric']} {score['measured']:.4f}. Predicted before it started: "
        f"{score['predicted']:.4f}, {PREDICTION_COVERAGE:.0%} interval {low:.4f} to {high:.4f}. The error is "
        f"{100 * score['error']:+.2f} %, {place} the interval. SHA-256 of the prediction: {score['prediction_sha256']}"
    )


def _run_table(law_fit: Fit) -> str:
    """Formats the runs with their errors, from small to large."""
    law, rows = law_fit.law, []
    for run in sorted(law.runs, key=lambda run: (run.parameters, run.tokens)):
        predicted = law.loss(run.parameters, run.tokens, run.epochs)
        numbers = f"{run.loss:.4f}", f"{predicted:.4f}", f"{100 * (run.loss / predicted - 1):+.2f} %"
        rows.append((large_number(run.parameters), large_number(run.tokens), f"{run.epochs:.2f}", *numbers))
    return markdown(("N", "D", "epochs", law.metric, "law", "error"), rows).rstrip()
