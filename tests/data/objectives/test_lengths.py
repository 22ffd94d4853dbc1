"""Tests that the longest text of a row fits the row, for every objective and length."""

import pytest

from pretrainax.data import objectives
from pretrainax.data.objectives import (
    UL2R,
    BidirectionalLM,
    CausalLM,
    DecoderOnly,
    Denoising,
    FillInTheMiddle,
    MaskedLM,
    MixtureOfDenoisers,
    NextSentencePrediction,
    Objective,
    ObjectiveMixture,
    PrefixLM,
    ReplacedTokenDetection,
    SentenceOrderPrediction,
    SequenceToSequence,
    SequentialDenoising,
    SpanCorruption,
    TextToText,
)

OBJECTIVES = [
    BidirectionalLM(),
    CausalLM(),
    PrefixLM(),
    FillInTheMiddle(),
    FillInTheMiddle(tokens_per_document=2),
    FillInTheMiddle(split="characters"),
    FillInTheMiddle(split="characters", tokens_per_document=2),
    FillInTheMiddle(split="characters", tokens_per_document=64),
    MaskedLM(),
    ReplacedTokenDetection(),
    NextSentencePrediction(),
    SentenceOrderPrediction(),
    SpanCorruption(),
    SpanCorruption(0.5, 3.0),
    SequentialDenoising(0.5),
    Denoising(),
    DecoderOnly(SpanCorruption()),
    DecoderOnly(SequentialDenoising(0.5)),
    DecoderOnly(Denoising()),
    DecoderOnly(MixtureOfDenoisers()),
    MixtureOfDenoisers(),
    UL2R(),
    ObjectiveMixture((CausalLM(), FillInTheMiddle(split="characters")), (0.5, 0.5)),
    TextToText(),
]


def test_every_objective_of_documents_is_here():
    kinds = [kind for kind in map(objectives.__dict__.get, objectives.__all__) if isinstance(kind, type)]
    of_documents = {kind for kind in kinds if issubclass(kind, Objective)} - {Objective, SequenceToSequence}
    assert of_documents == {type(objective) for objective in OBJECTIVES}


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_longest_text_fits_a_row(objective):
    for _, component in objective.components():
        shortest = max(component.shortest, 12)
        for length in [*range(shortest, 600), 805, 1023, 1024, 2048, 4096, 8192]:
            lengths = component.lengths(length)
            longest = component.measure(lengths.raw)
            assert longest.inputs <= lengths.inputs <= length, length
            assert longest.targets <= lengths.targets, length
