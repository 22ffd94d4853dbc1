"""Compares two models on the same documents or examples: paired differences, computed from transcripts."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Optional

import numpy as np

from pretrainax.config import UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.scoring.results import MIN_DOCUMENTS, Estimate, Result, paired_share, ratio

Transcripts = Sequence[JsonObject]


def paired_differences(
    one: Transcripts, other: Transcripts, results: Sequence[Result], other_results: Sequence[Result], other_name: str
) -> list[Result]:
    """Computes the differences `one` - `other` in bits per byte of text, and in the shares of correct examples.

    The errors are for paired samples: they exclude differences in difficulty between documents or examples.

    Args:
      one, other: transcripts of two models.
      results, other_results: the results of the two models.
      other_name: description of the other model.

    Raises:
      UserError: the models were scored on different bytes, or with different methods.
    """
    others = {(r.source, r.part, r.measure) for r in other_results}
    differences = []
    for result in results:
        is_text = result.measure.endswith("bits_per_byte")
        if is_text and (result.source, result.part, result.measure) not in others:
            raise UserError(
                f"--compare-with={other_name}: {result.measure} is not a metric of this model, which is scored in "
                "another way; --bytes-of-spans compares all models"
            )
        compare = _text_difference if is_text else _example_difference
        estimate, counts = compare(_matching(one, result), _matching(other, result), result.measure)
        if estimate is not None:
            part = ": ".join(filter(None, (result.part, f"difference from {other_name}")))
            fields = {"measure": f"{result.measure}_difference", "part": part, "counts": counts}
            differences.append(dataclasses.replace(result, **fields, **estimate._asdict()))
    return differences


def _matching(transcripts: Transcripts, result: Result) -> dict[Hashable, JsonObject]:
    """Selects the transcripts of a result that have a score, by part and number."""
    return {
        (part, transcript.get("document", transcript.get("example"))): transcript
        for transcript in transcripts
        if transcript["source"] == result.source and transcript.get("asked", True)
        if result.part in ("", part := transcript.get("group", transcript.get("part", "")))
    }


def _text_difference(
    one: Mapping[Hashable, JsonObject], other: Mapping[Hashable, JsonObject], measure: str
) -> tuple[Optional[Estimate], dict[str, int]]:
    if one.keys() != other.keys() or any(round(one[key]["bytes"] - other[key]["bytes"]) for key in one):
        raise UserError(
            f"--compare-with: the two models do not predict the same bytes, so {measure} has no paired difference; "
            "--bytes-of-spans compares all models"
        )
    bits, sizes, documents = [], [], []
    for number, key in enumerate(one):
        pair = one[key], other[key]
        if len(one) < MIN_DOCUMENTS and all("pieces" in transcript for transcript in pair):
            pieces = [transcript["pieces"] for transcript in pair]
            if np.array_equal(pieces[0]["bytes"], pieces[1]["bytes"]):  # the tokenizers are the same
                pair = pieces
        bits.append(np.subtract(*(np.atleast_1d(transcript["nats"]) for transcript in pair)) / np.log(2))
        sizes.append(np.atleast_1d(pair[0]["bytes"]))
        documents.append(np.full(len(sizes[-1]), number))
    return ratio(*map(np.concatenate, (bits, sizes, documents))), {"documents": len(one)}


def _example_difference(
    one: Mapping[Hashable, JsonObject], other: Mapping[Hashable, JsonObject], measure: str
) -> tuple[Optional[Estimate], dict[str, int]]:
    """Computes the difference between two shares of correct examples, over the examples with answers of both models.

    Returns None for other metrics.
    """
    keys = [key for key in one if key in other]
    counts = {"examples": len(keys)} | ({"not asked of both models": n} if (n := len(one | other) - len(keys)) else {})
    if not keys or measure not in ("accuracy", "accuracy_per_byte", "accuracy_unconditional", "exact_match"):
        return None, counts

    def is_correct(transcript: JsonObject) -> float:
        correct = transcript["correct"]
        return float(correct[measure] if isinstance(correct, dict) else correct)

    return paired_share([is_correct(one[key]) - is_correct(other[key]) for key in keys]), counts
