"""Flags set fields by the types of the fields, or give an error of one line."""

from typing import Literal, Optional

import pytest

from pretrainax.config import Generator, UserError, from_json, to_json
from pretrainax.config.overrides import fields_named, read_value, set_field
from pretrainax.config.validation import validate
from pretrainax.data.sources import TextFiles
from pretrainax.optim import AdamW, Optimizer
from pretrainax.zoo.electra import electra
from tests.support import tiny


@pytest.mark.parametrize(
    "text, hint, value",
    [
        ("1000", int, 1000),
        ("1_000", int, 1000),
        ("-7", int, -7),
        ("1e3", int, 1000),
        ("1.5e3", int, 1500),
        ("9007199254740993", int, 2**53 + 1),  # not representable as a float
        ("1e-3", float, 0.001),
        ("3", float, 3.0),
        *((word, bool, True) for word in ("true", "True", "yes", "on", "1")),
        *((word, bool, False) for word in ("false", "False", "no", "off", "0")),
        *((word, Optional[int], None) for word in ("none", "None")),
        ("5", Optional[int], 5),
        ("none", Optional[str], None),
        ("none", str, "none"),
        ("none", Literal["none", "dots"], "none"),
        ("None", Optional[Optimizer], None),
        ("AdamW(learning_rate=0.5)", Optional[Optimizer], AdamW(learning_rate=0.5)),
        ("(1, 2)", tuple[int, ...], (1, 2)),
        ("[1, 2]", tuple[int, ...], (1, 2)),
        ("3", tuple[int, ...], (3,)),
        ("local,global", tuple[Literal["local", "global"], ...], ("local", "global")),
        ("grammar,arc", tuple[str, ...], ("grammar", "arc")),
        ("In 1492, Columbus", tuple[str, ...], ("In 1492, Columbus",)),
        ("('In 1492, Columbus', 'we')", tuple[str, ...], ("In 1492, Columbus", "we")),
    ],
)
def test_a_text_is_read_as_the_type_of_its_field(text, hint, value):
    assert read_value(text, hint) == value
    assert type(read_value(text, hint)) is type(value)


@pytest.mark.parametrize("text", ["1e17", "1.5", "1e400", "nan", "ten", "", "9" * 5000, "-" * 3000 + "1"])
def test_what_is_no_whole_number_exactly_is_refused(text):
    with pytest.raises(UserError, match="config.train.steps=.*: it must be of type int") as error:
        read_value(text, int, "config.train.steps")
    assert len(str(error.value)) < 300


def test_fields_are_set_one_after_the_other():
    experiment = tiny.get_config("gpt")
    set_field(experiment, "config.data.source", "JsonLines(path='a')")
    set_field(experiment, "config.data.source.text_field", "body")
    set_field(experiment, "config.evaluate.patience", "3")
    set_field(experiment, "config.evaluate.patience", "none")
    set_field(experiment, "config.data.drop_duplicates", None)  # a flag without a value
    assert (experiment.data.source.text_field, experiment.evaluate.patience) == ("body", None)
    assert experiment.data.drop_duplicates


def test_a_flag_gives_a_generator_whole_and_then_its_fields():
    experiment = tiny.get_config("bert")
    experiment.model = electra("small")
    set_field(experiment, "config.model.generator", "Generator(num_layers=2, d_model=32, d_ff=64)")
    set_field(experiment, "config.model.generator.num_heads", "2")
    assert experiment.model.generator == Generator(num_layers=2, d_model=32, d_ff=64, num_heads=2)
    set_field(experiment, "config.model.generator.num_heads", "5")
    with pytest.raises(UserError, match="config.model.generator.d_model 32 is not a multiple of"):
        validate(experiment, files=False)


def test_a_generator_of_an_older_config_json_has_no_type_and_is_read():
    value = to_json(electra("small"))
    del value["generator"]["type"]
    assert from_json(type(electra("small")), value) == electra("small")


def test_fields_are_found_by_the_end_of_their_path():
    experiment = tiny.get_config("gpt")
    assert fields_named("train.steps", experiment) == fields_named("steps", experiment) == ["config.train.steps"]
    assert fields_named("path", experiment) == ["config.tokenizer.path", "config.data.source.path"]
    assert isinstance(experiment.data.source, TextFiles)


@pytest.mark.parametrize("path", ["config.optimizer.arguments", "config.objective.families"])
def test_a_class_variable_is_no_field(path):
    experiment = tiny.get_config("gpt")
    name = path.rpartition(".")[2]
    with pytest.raises(UserError, match=f"has no field '{name}'") as error:
        set_field(experiment, path, "3")
    assert f"{name}," not in str(error.value).partition("has no field")[2] and "choices with" not in str(error.value)
