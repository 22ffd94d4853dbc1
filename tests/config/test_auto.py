"""Tests sizes that are `auto`: fields that allow it, resolved values, and errors if a value cannot be determined."""

import json

import pytest

from pretrainax import config as config_lib
from pretrainax.config import (
    AUTO,
    Choice,
    DisentangledPositions,
    Experiment,
    LearnedPositions,
    RelativePositionBuckets,
    RotaryPositions,
    UserError,
    resolve_auto,
)
from pretrainax.config.validation import validate
from pretrainax.data.sources import TextFiles
from pretrainax.tokenization import Characters
from tests.support import tiny


def make(variant="gpt", position=None):
    experiment = tiny.get_config(variant)
    experiment.data.source = TextFiles(path=__file__)
    experiment.model.vocab_size = AUTO
    experiment.model.position = position or LearnedPositions(AUTO)
    return experiment


@pytest.mark.parametrize("ids, rows", [(1, 128), (128, 128), (129, 256), (8292, 8320), (50_257, 50_304)])
def test_rows_are_the_next_multiple_of_128(ids, rows):
    experiment = make()
    resolve_auto(experiment, ids)
    assert experiment.model.vocab_size == rows


@pytest.mark.parametrize("kind", [LearnedPositions, RotaryPositions, DisentangledPositions])
@pytest.mark.parametrize("variant", ["gpt", "bert", "t5"])
def test_positions_are_those_of_the_longest_row(variant, kind):
    experiment = make(variant, kind(max_length=AUTO))
    resolve_auto(experiment, 400)
    lengths = experiment.objective.lengths(experiment.data.sequence_length)
    assert experiment.model.position == kind(max_length=max(lengths.inputs, lengths.targets))


def test_numbers_and_positions_without_a_length_stay(text):
    experiment = make("t5", RelativePositionBuckets())
    experiment.model.vocab_size = 777
    resolve_auto(experiment, 400)
    assert (experiment.model.vocab_size, experiment.model.position) == (777, RelativePositionBuckets())


def test_what_only_the_text_can_tell_is_one_line():
    with pytest.raises(UserError, match="config.model.vocab_size is 'auto'.*give a number"):
        resolve_auto(make(), None)


@pytest.mark.parametrize("tokenizer", [None, Characters()])
def test_a_config_with_auto_is_sound_and_survives_json(tokenizer):
    experiment = make()
    experiment.tokenizer = tokenizer or experiment.tokenizer
    validate(experiment)
    assert config_lib.from_json(Experiment, json.loads(config_lib.dump(experiment))) == experiment


def test_a_whole_choice_takes_the_word():
    assert Choice.parse("LearnedPositions(max_length='auto', offset=2)") == LearnedPositions(AUTO, 2)
    with pytest.raises(UserError, match="LearnedPositions.max_length is 'atuo', it must be of type int or 'auto'"):
        Choice.parse("LearnedPositions(max_length='atuo')")


def test_another_word_in_a_file_is_one_line():
    value = json.loads(config_lib.dump(make()))
    value["model"]["vocab_size"] = "atuo"
    with pytest.raises(UserError, match="config.model.vocab_size is 'atuo', it must be of type int or 'auto'"):
        config_lib.from_json(Experiment, value)
