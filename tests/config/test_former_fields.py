"""A config.json that an earlier version wrote is read as the current one."""

from pretrainax.config import Experiment, from_json, to_json
from pretrainax.config.serialization import differences
from tests.support import tiny


def test_the_recurrent_field_of_a_model_is_a_part():
    experiment = tiny.get_config("elmo")
    former = to_json(experiment)
    (former["model"]["recurrent"],) = former["model"].pop("parts")
    assert differences(experiment, from_json(Experiment, former)) == []


def test_a_transformer_had_that_field_without_a_value():
    experiment = tiny.get_config("gpt")
    former = to_json(experiment)
    former["model"]["recurrent"] = None
    assert differences(experiment, from_json(Experiment, former)) == []
