"""Tests ObjectiveMixture: components by weight, rows with room for the longest, and one-line errors."""

import dataclasses
import json

import pytest

from pretrainax.config import (
    DataConfig,
    Experiment,
    ModelConfig,
    RelativePositionBuckets,
    UserError,
    from_json,
    to_json,
)
from pretrainax.data.objectives import CausalLM, Denoising, Lengths, MaskedLM, ObjectiveMixture, SpanCorruption
from pretrainax.tokenization.base import Vocabulary

SHORT, LONG = SpanCorruption(), SpanCorruption(noise_density=0.5)
VOCABULARY = Vocabulary(size=1000, pad=0, eos=1, sentinels=tuple(range(800, 1000)))


def problems(objective, family="encoder_decoder", length=512):
    model = ModelConfig(family=family, position=RelativePositionBuckets())
    return list(objective.problems(Experiment(model, None, DataConfig(None, length), objective, None, None)))


def test_components_have_the_weights():
    assert ObjectiveMixture((SHORT, LONG), (3.0, 1.0)).components() == [(3.0, SHORT), (1.0, LONG)]


def test_mixtures_in_a_mixture_are_laid_open():
    inner = ObjectiveMixture((SHORT, LONG), (3.0, 1.0))
    assert ObjectiveMixture((inner, CausalLM()), (8.0, 2.0)).components() == [
        (6.0, SHORT),
        (2.0, LONG),
        (2.0, CausalLM()),
    ]


def test_an_objective_of_weight_0_has_no_rows():
    mixture = ObjectiveMixture((SHORT, LONG), (1.0, 0.0))
    assert mixture.components() == [(1.0, SHORT)]
    assert mixture.lengths(512) == SHORT.lengths(512)


def test_rows_have_room_for_the_longest():
    assert (SHORT.lengths(512), LONG.lengths(512)) == (Lengths(568, 512, 114), Lengths(767, 512, 513))
    assert ObjectiveMixture((SHORT, LONG), (1.0, 1.0)).lengths(512) == Lengths(767, 512, 513)
    assert ObjectiveMixture((SHORT, LONG), (1.0, 1.0)).measure(100) == Lengths(
        100, 91, 68
    )  # 100 - 15 + 5 + 1; 50 + 17 + 1


def test_every_part_is_bound(tokenizers_of_all_kinds):
    mixture = ObjectiveMixture((SpanCorruption(mode="[NLU]"), SHORT), (1.0, 1.0))
    bound = mixture.bind(tokenizers_of_all_kinds["Unigram"])
    assert [objective._mode_token_ids is not None for _, objective in bound.components()] == [True, False]
    assert bound == mixture


def test_it_trains_what_all_parts_train():
    assert ObjectiveMixture((SHORT, Denoising()), (1.0, 1.0)).families == ("encoder_decoder",)
    assert ObjectiveMixture((SHORT, MaskedLM()), (1.0, 1.0)).families == ()


def test_it_survives_json():
    mixture = ObjectiveMixture((SHORT, ObjectiveMixture((LONG,), (1.0,))), (3.0, 1.0))
    assert from_json(ObjectiveMixture, json.loads(json.dumps(to_json(mixture)))) == mixture


def test_the_vocabulary_must_do_for_every_part():
    few = dataclasses.replace(VOCABULARY, sentinels=VOCABULARY.sentinels[:100])
    ObjectiveMixture((SHORT, LONG), (1.0, 0.0)).check_vocabulary(few, 512)
    with pytest.raises(UserError, match="100 sentinels, .* have 128 spans"):
        ObjectiveMixture((SHORT, LONG), (1.0, 1.0)).check_vocabulary(few, 512)


@pytest.mark.parametrize(
    "mixture, problem",
    [
        (ObjectiveMixture(), "config.objective.objectives is (), it must have at least one"),
        (
            ObjectiveMixture((SHORT, LONG), (1.0,)),
            "config.objective.weights has 1 numbers, it must have 2: one per objective",
        ),
        (
            ObjectiveMixture((SHORT, LONG), (2.0, -1.0)),
            "config.objective.weights is (2.0, -1.0), they must be finite and not negative",
        ),
        (
            ObjectiveMixture((SHORT, LONG), (2.0, float("nan"))),
            "config.objective.weights is (2.0, nan), they must be finite and not negative",
        ),
        (
            ObjectiveMixture((SHORT, LONG), (0.0, 0.0)),
            "config.objective.weights is (0.0, 0.0), at least one must be greater than 0",
        ),
        (
            ObjectiveMixture((SHORT, Denoising()), (1.0, 1.0)),
            "config.objective.objectives are made of sentences and of tokens: all must read the same unit",
        ),
        (
            ObjectiveMixture((SHORT, MaskedLM()), (1.0, 1.0)),
            "config.objective.objectives SpanCorruption, MaskedLM train no config.model.family in common",
        ),
        (
            ObjectiveMixture((SHORT, SpanCorruption(0.0)), (1.0, 1.0)),
            "config.objective.objectives[1].noise_density is 0.0, it must be in (0, 1)",
        ),
    ],
)
def test_what_cannot_be_mixed(mixture, problem):
    assert problems(mixture) == [problem]


def test_a_model_of_another_family_is_one_line():
    (line,) = problems(ObjectiveMixture((SHORT, LONG), (1.0, 1.0)), family="decoder")
    assert line.startswith(
        "config.objective is ObjectiveMixture, which trains config.model.family encoder_decoder, not"
    )


def test_what_a_part_needs_is_told():
    mixture = ObjectiveMixture((SHORT, SpanCorruption(mode="[NLU]")), (1.0, 1.0))
    assert problems(mixture, length=8) == ["config.data.sequence_length is 8, SpanCorruption needs at least 9"]


def test_parts_that_fit_have_no_problem():
    assert problems(ObjectiveMixture((SHORT, LONG), (1.0, 1.0))) == []
