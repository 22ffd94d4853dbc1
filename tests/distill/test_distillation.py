"""Tests that each mistake in a distillation is a one-line error that names the field to set."""

import dataclasses

import pytest

from pretrainax.adapt import BitFit
from pretrainax.config import (
    Classify,
    DisentangledPositions,
    Extract,
    Generator,
    LearnedPositions,
    SlidingWindows,
    UserError,
    from_json,
    to_json,
)
from pretrainax.config.validation import validate
from pretrainax.distill import DistilBERT, Distillation, MiniLM, TinyBERT
from tests.support import tiny


def experiment_of(distillation):
    experiment = tiny.get_config("bert")
    experiment.distill = distillation
    return experiment


def changed(part, **values):
    for name, value in values.items():
        setattr(part, name, value)


# The change -> the error.
MISTAKES = {
    "a temperature of 0": (lambda e: changed(e.distill, temperature=0.0), "temperature is 0.0, it must be above 0"),
    "a layer without its weight": (
        lambda e: changed(e.distill, relation_layer=2),
        "relation_layer is 2, which has no effect if config.distill.relations is 0: set relations above 0",
    ),
    "a distance without its weight": (
        lambda e: changed(e, distill=MiniLM("a folder", distance="cosine")),
        "distance is 'cosine', which has no effect if config.distill.hidden is 0: set hidden above 0, or distance to",
    ),
    "a temperature without soft targets": (
        lambda e: changed(e, distill=TinyBERT("a folder", temperature=2.0)),
        "temperature is 2.0, which has no effect if config.distill.soft is 0: set soft above 0, or temperature to 1.0",
    ),
    "a weight below 0": (lambda e: changed(e.distill, hidden=-1.0), "config.distill.hidden is -1.0, it must be at"),
    "nothing to learn": (lambda e: changed(e.distill, soft=0.0), "set one of soft, hidden, embeddings, attention"),
    "no teacher": (lambda e: changed(e.distill, teacher=""), "config.distill.teacher is empty"),
    "a teacher elsewhere": (
        lambda e: changed(e.distill, teacher="hdfs://a/b"),
        "config.distill.teacher is 'hdfs://a/b'",
    ),
    "a tuning beside": (lambda e: changed(e, tuning=BitFit()), "config.distill and config.tuning are both set"),
    "two encoders": (
        lambda e: changed(e.model, generator=Generator(1, 8, 8, 1), replaced_token_head=True),
        "config.distill does not support config.model.generator",
    ),
    "a kernel without logits": (
        lambda e: (changed(e.distill, attention=1.0), changed(e.train, attention="cudnn")),
        "which config.train.attention=cudnn does not materialize: set it to 'xla'",
    ),
    "no plain logits": (
        lambda e: (changed(e.distill, attention=1.0), changed(e.model, position=DisentangledPositions())),
        "config.model has DisentangledPositions, which has no plain attention logits",
    ),
    "keys that few queries meet": (
        lambda e: (changed(e.distill, relations=1.0), changed(e.model, sparse_attention=SlidingWindows())),
        "config.model has sparse_attention, whose keys are not visible to all queries: set config.distill.attent",
    ),
    "no states": (
        lambda e: (
            changed(e.distill, hidden=1.0),
            changed(e.model, position=DisentangledPositions(), enhanced_mask_decoder=True),
        ),
        "config.model has enhanced_mask_decoder, whose last layer runs twice",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_config_is_told_in_one_line(mistake):
    experiment = experiment_of(Distillation("a folder"))
    change, line = MISTAKES[mistake]
    change(experiment)
    with pytest.raises(UserError) as told:
        validate(experiment)
    assert line in str(told.value) and "\n" not in str(told.value)


# The changes of the distillation and of the teacher -> the error.
TEACHERS = {
    "another family": ({}, {"family": "decoder"}, "has family 'decoder', config.model.family is 'encoder'"),
    "another vocabulary": ({}, {"vocab_size": 600}, "has 600 ids, config.model.vocab_size is 512: set it"),
    "shorter rows": ({}, {"position": LearnedPositions(32)}, "reads at most 32 tokens, config.model.position.max"),
    "layers that do not divide": ({"hidden": 1.0}, {"num_layers": 5}, "has 5 layers, which config.model.num_layers=2"),
    "layers for attention": ({"attention": 1.0}, {"num_layers": 3}, "has 3 layers, which config.model.num_layers=2"),
    "other attention heads": ({"attention": 1.0}, {"num_heads": 8}, "has 8 attention heads, config.model.num_heads is"),
    "parts that do not divide": ({"relations": 1.0, "relation_heads": 5}, {}, "is 5, which does not divide the widths"),
    "a layer that is not there": (
        {"relations": 1.0, "relation_layer": 3},
        {},
        "relation_layer is 3, the teacher T has",
    ),
    "no answers": ({}, {"head": Classify(num_labels=2), "masked_lm_head": False}, "lacks the heads lm"),
    "no states": ({"hidden": 1.0}, {"enhanced_mask_decoder": True}, "the teacher T has enhanced_mask_decoder"),
}


@pytest.mark.parametrize("mistake", TEACHERS)
def test_a_teacher_that_does_not_fit_is_told_in_one_line(mistake):
    fields, of_teacher, line = TEACHERS[mistake]
    student = tiny.get_config("bert").model
    assert (
        list(
            Distillation("T", **fields | {"relation_heads": 0, "relation_layer": 0}).teacher_problems(student, student)
        )
        == []
    )
    (found,) = Distillation("T", **fields).teacher_problems(student, dataclasses.replace(student, **of_teacher))
    assert line in found


# The same for a student with two stacks and a teacher with a narrower decoder.
NARROW = {
    "one map for two widths": (
        {"hidden": 1.0},
        "than config.model (32 to 24 and 32 to 32), and both stacks share one map",
    ),
    "embeddings too": ({"embeddings": 1.0}, "set config.distill.hidden and config.distill.embeddings to 0, or use"),
    "heads of the decoder": ({"attention": 1.0}, "has 8 attention heads, config.model.num_heads is 4"),
    "parts of the decoder": ({"relations": 1.0, "relation_heads": 32}, "is 32, which does not divide the widths"),
}


@pytest.mark.parametrize("mistake", NARROW)
def test_a_stack_of_a_teacher_that_does_not_fit_is_told_in_one_line(mistake):
    fields, line = NARROW[mistake]
    student, teacher = (tiny.get_config(variant).model for variant in ("t5", "t5_narrow"))
    teacher.num_decoder_layers = 2
    (found,) = Distillation("T", **fields).teacher_problems(student, teacher)
    assert line in found
    alike = Distillation("T", **{name: x for name, x in fields.items() if name != "relation_heads"})
    assert list(alike.teacher_problems(teacher, teacher)) == []


def test_a_task_of_other_labels_is_another_task():
    model = dataclasses.replace(
        tiny.get_config("bert").model, masked_lm_head=False, head=Classify(num_labels=2, kind="single")
    )
    teacher = dataclasses.replace(model, head=Classify(num_labels=3, kind="single"))
    (found,) = Distillation("T").teacher_problems(model, teacher)
    assert "has 3 labels, kind=single, config.model.head has 2 labels, kind=single: the tasks must be" in found


def test_a_student_that_excludes_answers_of_its_teacher_is_refused():
    model = dataclasses.replace(tiny.get_config("bert").model, masked_lm_head=False)
    plain, second = (dataclasses.replace(model, head=Extract(second_text=x)) for x in (False, True))
    (found,) = Distillation("T").teacher_problems(second, plain)
    assert "config.model.head.second_text=True excludes" in found
    for student, teacher in ((plain, second), (second, second), (plain, plain)):
        assert not list(Distillation("T").teacher_problems(student, teacher))


@pytest.mark.parametrize("preset", (DistilBERT, TinyBERT, MiniLM))
def test_what_is_named_after_a_paper_is_sound_and_comes_back_from_json(preset):
    experiment = experiment_of(preset("a folder"))
    if preset is MiniLM:
        experiment.distill.relation_heads = 8
    validate(experiment, files=False)
    assert list(experiment.distill.teacher_problems(experiment.model, experiment.model)) == []
    assert from_json(type(experiment), to_json(experiment)).distill == experiment.distill
