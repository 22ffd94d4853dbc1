"""Computes the measure `BitsPerByte`: bits per byte of held-out spans, and of a model of byte frequencies."""

from collections.abc import Iterator

import numpy as np

from pretrainax.config import Experiment, UserError
from pretrainax.data.objectives import (
    CausalLM,
    DecoderOnly,
    Denoising,
    FillInTheMiddle,
    SequentialDenoising,
    SpanCorruption,
)
from pretrainax.inference.load import load
from pretrainax.runs.cluster_sums import MIN_DOCUMENTS
from pretrainax.scoring.results import leave_one_out
from pretrainax.scoring.span_choice import Span, SpanChoice
from pretrainax.scoring.span_forms import BOTH, LEFT
from pretrainax.scoring.spans import chosen_spans, documents_of_source, length_bits, score_chosen
from pretrainax.studies.measures import BitsPerByte
from pretrainax.studies.outcomes import MeasureContext, Outcome
from pretrainax.studies.saved_outcomes import is_chosen, saved_outcomes

_PREDICTING = (CausalLM, DecoderOnly, Denoising, FillInTheMiddle, SequentialDenoising, SpanCorruption)


def problems(measure: BitsPerByte, experiment: Experiment) -> Iterator[str]:
    """Yields one line for each reason why a run cannot have the measure."""
    try:
        _choice(measure)
    except UserError as e:
        yield str(e)
    model, objective = experiment.model, experiment.objective
    if model.family == "encoder":
        if not model.masked_lm_head and model.generator is None:
            yield "config.model has no head that predicts masked tokens, which bits per byte of spans need"
    elif not any(isinstance(part, _PREDICTING) for _, part in objective.components()):
        yield f"config.objective is {type(objective).__name__}, which predicts no tokens of a text"


def outcomes(measure: BitsPerByte, folder: str, context: MeasureContext) -> list[Outcome]:
    """Computes the bits per byte of a run; all downstream seeds have the same outcome, because nothing is random."""

    def compute(_: str) -> dict[str, Outcome]:
        loaded = load(folder)
        spans, records = _spans(measure, context.is_tuning)
        scores = score_chosen(loaded.generator or loaded, spans)
        wanted = LEFT if measure.given == "left" else BOTH
        score = next((x for x in scores if x.form.given == wanted), scores[0])
        return {"model": _outcome(score.bits, spans, records)}

    settings = {"is_tuning": context.is_tuning}
    return [saved_outcomes(folder, measure, "outcomes", settings, compute)["model"]] * len(context.downstream_seeds)


def baselines(measure: BitsPerByte, folder: str, context: MeasureContext) -> dict[str, Outcome]:
    """Computes the bits per byte of a model that uses only the frequencies of bytes and of span lengths.

    The frequencies are counted in the spans of all other records; one extra count is split evenly among all bytes.
    """

    def compute(_: str) -> dict[str, Outcome]:
        spans, records = _spans(measure, context.is_tuning)
        of_record = np.zeros((records.max() + 1, 256))
        texts = [np.frombuffer(span.text.encode(), np.uint8) for span in spans]
        for record, text in zip(records, texts, strict=True):
            of_record[record] += np.bincount(text, minlength=256)
        total, bits = of_record.sum(0), np.zeros(len(spans))
        for i, (record, text) in enumerate(zip(records, texts, strict=True)):
            counts = total - of_record[record] + 1 / 256
            bits[i] = -np.log2(counts[text] / counts.sum()).sum()
        bits += length_bits(np.array([len(text) for text in texts]), records)
        return {"byte frequencies": _outcome(bits, spans, records)}

    return saved_outcomes(folder, measure, "baselines", {"is_tuning": context.is_tuning}, compute)


def _choice(measure: BitsPerByte) -> SpanChoice:
    return SpanChoice(measure.share, measure.mean_bytes, measure.context, measure.seed)


def _spans(measure: BitsPerByte, is_tuning: bool) -> tuple[list[Span], np.ndarray]:
    """Selects the spans of the tuning or of the final runs; also returns the record of each span, [spans]."""
    texts = documents_of_source(measure.source, measure.split, measure.documents)
    spans = chosen_spans(texts, _choice(measure))
    documents = np.array([span.document for span in spans])
    records = documents if len(np.unique(documents)) >= MIN_DOCUMENTS else np.arange(len(spans))
    chosen = np.flatnonzero(is_chosen(records, is_tuning))
    if len(np.unique(records[chosen])) < 2:
        raise UserError(f"{measure.source} has {len(spans)} spans, too few for a study: give more text, or raise share")
    spans = [spans[i]._replace(right="") if measure.given == "left" else spans[i] for i in chosen]
    return spans, records[chosen]


def _outcome(bits: np.ndarray, spans: list[Span], records: np.ndarray) -> Outcome:
    index = np.unique(records, return_inverse=True)[1]
    num_bytes = np.array([span.num_bytes for span in spans], np.float64)
    value, changes, _ = leave_one_out(np.bincount(index, bits), np.bincount(index, num_bytes))
    return Outcome(value, changes)
