"""A choice is written in the syntax of flags; each kind of choice has a list of alternatives."""

import dataclasses

import pytest

from pretrainax.config import Choice, UserError, kinds
from pretrainax.data.objectives import MaskedLM, NGrams, ObjectiveMixture, SpanCorruption
from pretrainax.data.objectives.base import Objective
from pretrainax.data.sources import JsonLines, SourceMixture, TextFiles
from pretrainax.optim import AdamW
from pretrainax.tasks.base import Task

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


@pytest.mark.parametrize(
    "kind, text, names",
    [
        *((kinds.Objective, text, ["MaskedLM"]) for text in ("MLM()", "mlm", "Mlm(rate=0.3)", "masked_lm", "Masked")),
        *((kinds.Objective, text, ["CausalLM"]) for text in ("CLM", "causal-lm()")),
        (kinds.Objective, "LM()", ["BidirectionalLM", "CausalLM", "MaskedLM", "PrefixLM"]),
        (kinds.Objective, "RTD", ["ReplacedTokenDetection"]),
        (kinds.Objective, "NSP", ["NextSentencePrediction"]),
        (kinds.Objective, "SOP", ["SentenceOrderPrediction"]),
        (kinds.Objective, "FIM", ["FillInTheMiddle"]),
        (kinds.Objective, "QA", ["ExtractiveQA"]),
        *((kinds.Optimizer, text, ["AdamW"]) for text in ("adam_w", "adamw()", "Adam", "ADAMW(b2=0.98)")),
        (kinds.Optimizer, "Soap", ["SOAP"]),
        (kinds.Schedule, "WSD", ["WarmupStableDecay"]),
        (kinds.Schedule, "cosine", ["WarmupCosine"]),
        (kinds.TokenizerConfig, "bbpe", ["ByteBPE"]),
        (kinds.Tuning, "lora", ["LoRA"]),
        (kinds.Source, "csv", ["Csv"]),
        (kinds.Source, "TextFile", ["TextFiles"]),
    ],
)
def test_an_abbreviation_suggests_the_class(kind, text, names):
    text = text.replace("-", "_")
    with pytest.raises(UserError, match=f"did you mean {' or '.join(map(repr, names))}\\?$"):
        kind.parse(text)


@pytest.mark.first(2)
@pytest.mark.parametrize("kind", ["Objective", "Optimizer", "Schedule", "Source", "TokenizerConfig", "Tuning"])
def test_each_class_is_suggested_for_its_name_in_another_case(kind):
    kind = getattr(kinds, kind)
    for name in (cls.__name__ for cls in Choice.alternatives(kind)):
        for typed in (name.lower(), name.upper(), f"{name[0]}_{name[1:]}"):
            if typed != name:
                with pytest.raises(UserError, match=f"did you mean {name!r}\\?$"):
                    kind.parse(typed)


@pytest.mark.parametrize("text", ["x", "_", "sgd", "T5", "not_a_class()"])
def test_a_name_like_no_other_lists_what_is_allowed(text):
    with pytest.raises(UserError, match="unknown Optimizer .*, allowed: AdEMAMix, Adafactor"):
        kinds.Optimizer.parse(text)


def test_a_base_class_is_no_choice():
    for base in (value for value in vars(kinds).values() if isinstance(value, type) and issubclass(value, Choice)):
        bases = [cls.__name__ for cls in Choice.alternatives(base) if (cls.__doc__ or "").startswith("Base class")]
        assert bases == [] and not {"TextTask", "WritingTask"} & set(base.names())
    with pytest.raises(UserError, match="unknown Objective 'TextTask'"):
        kinds.Objective.parse("TextTask()")


@pytest.mark.slow
def test_a_base_cannot_be_chosen():
    with pytest.raises(UserError, match="unknown choice 'Schedule'"):
        Choice.parse("Schedule()")


def test_no_objective_has_a_field_with_the_name_of_an_attribute_of_all_objectives():
    """MarkedWords once had the field `unit`, which replaced `Objective.unit`, so its records were read as text."""
    for cls in Choice.alternatives(kinds.Objective):
        names = {field.name for field in dataclasses.fields(cls)} - {"static"}  # it has the same meaning in both
        assert not names & set(dir(Task if issubclass(cls, Task) else Objective)), cls.__name__
