"""Validation rejects attributes that no class declares, and values of a wrong type, in all sections of a config."""

import dataclasses

import pytest

from pretrainax.config import UserError, validation
from pretrainax.data.objectives import ObjectiveMixture, SpanCorruption
from pretrainax.data.sources import PythonDocs, TextFiles
from tests.support import tiny

CHECKS = pytest.mark.parametrize("check", [validation.complete, validation.validate])


@dataclasses.dataclass
class Counting(SpanCorruption):
    def __post_init__(self):
        self.calls = 0


@CHECKS
@pytest.mark.parametrize(
    "section, name, value, message",
    [
        ("data", "source", TextFiles, "config.data.source is <class .*>, it must be of kind Source"),
        ("", "trian", 5, "config has no field 'trian', did you mean 'train'"),
        ("train", "stpes", 5, "config.train has no field 'stpes', did you mean 'steps'"),
        ("optimizer", "momentum", 0.9, "config.optimizer has no field 'momentum', did you mean 'moment_dtype'"),
    ],
)
def test_an_attribute_that_is_no_field_is_one_line(section, name, value, message, check):
    experiment = tiny.get_config("t5")
    setattr(validation.get(experiment, section) if section else experiment, name, value)
    with pytest.raises(UserError, match=message):
        check(experiment)


@CHECKS
def test_an_attribute_that_is_no_field_is_found_in_a_tuple(check):
    experiment = tiny.get_config("t5")
    experiment.objective = ObjectiveMixture(objectives=(SpanCorruption(), SpanCorruption()), weights=(1, 1))
    experiment.objective.objectives[1].noise_desnity = 0.5
    with pytest.raises(UserError, match=r"config.objective.objectives\[1\] has no field 'noise_desnity', did you mean"):
        check(experiment)


@CHECKS
def test_a_class_of_a_user_may_have_attributes_of_its_own(check):
    experiment = tiny.get_config("t5")
    experiment.objective, experiment.data.source = Counting(), PythonDocs()
    check(experiment)
