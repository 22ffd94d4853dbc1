"""A choice is written as a flag reads it, and what can be chosen is known."""

import pytest

from pretrainax.config import Choice, UserError, kinds
from pretrainax.data.objectives import MaskedLM, NGrams, ObjectiveMixture, SpanCorruption
from pretrainax.data.sources import JsonLines, SourceMixture, TextFiles
from pretrainax.optim import AdamW

CHOICES = {
    "AdamW()": AdamW(),
    "AdamW(b2=0.98, clip_norm=None)": AdamW(b2=0.98, clip_norm=None),
    "MaskedLM(mask_unit=NGrams(weights=(1.0,)))": MaskedLM(mask_unit=NGrams(weights=(1.0,))),
    "JsonLines(path='a \"b\" c', text_field='body')": JsonLines(text_field="body", path='a "b" c'),
    "SourceMixture(sources=(TextFiles(path='a'), TextFiles(path='b')), weights=(1, 3))": SourceMixture(
        sources=(TextFiles("a"), TextFiles("b")), weights=(1, 3)
    ),
    "ObjectiveMixture(objectives=(SpanCorruption(mode='[NLU]'),), weights=(1.0,))": ObjectiveMixture(
        (SpanCorruption(mode="[NLU]"),), (1.0,)
    ),
}


@pytest.mark.parametrize("text", CHOICES)
def test_a_choice_is_written_without_its_defaults_and_read_back(text):
    assert str(CHOICES[text]) == text
    assert Choice.parse(text) == CHOICES[text]


def test_the_alternatives_of_a_kind_are_its_classes_and_no_base():
    schedules = {cls.__name__ for cls in Choice.alternatives(kinds.Schedule)}
    assert schedules == {
        *("WarmupCosine", "WarmupLinear", "WarmupInverseSquareRoot", "WarmupConstant", "WarmupStableDecay"),
        "WarmupSteps",
    }
    assert "TFDS" in {cls.__name__ for cls in Choice.alternatives(kinds.Source)}


@pytest.mark.slow
def test_a_base_cannot_be_chosen():
    with pytest.raises(UserError, match="unknown choice 'Schedule'"):
        Choice.parse("Schedule()")
