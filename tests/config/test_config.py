"""Configs as JSON and from flags, and what validate says of bad ones."""

import dataclasses
import json
import typing

import pytest

from pretrainax import config as config_lib
from pretrainax import optim
from pretrainax.config import (
    Choice,
    DataConfig,
    DecoderSizes,
    Experiment,
    LongRopeScaling,
    RotaryPositions,
    SinusoidalPositions,
    TrainConfig,
    UserError,
    validation,
)
from pretrainax.config.validation import complete
from pretrainax.data.objectives import Objective, ObjectiveMixture
from pretrainax.data.sources import PythonDocs, Source, SourceMixture, TextFiles
from pretrainax.tasks import TokenClassification
from pretrainax.tokenization import Unigram
from tests.support import tiny


@pytest.mark.parametrize("variant", ["t5", "bert", "gpt"])
def test_json_gives_the_same_config_back(variant):
    experiment = tiny.get_config(variant)
    assert config_lib.from_json(Experiment, json.loads(config_lib.dump(experiment))) == experiment


def test_a_config_json_of_before_a_field_means_what_was_so():
    experiment = tiny.get_config("bert")
    value = config_lib.to_json(experiment)
    del value["model"]["attention_dropout_rate"], value["schedule"]["start_fraction"]
    assert config_lib.from_json(config_lib.Experiment, value) == experiment


def test_json_keeps_an_optional_part():
    experiment = tiny.get_config("gpt")
    experiment.model.position = RotaryPositions(scaling=config_lib.LongContextScaling(factor=32.0))
    assert config_lib.from_json(Experiment, config_lib.to_json(experiment)) == experiment


def test_json_with_an_unknown_field_names_the_nearest():
    value = config_lib.to_json(tiny.get_config("t5"))
    value["train"]["stpes"] = value["train"].pop("steps")
    with pytest.raises(UserError, match="config.train: unknown field 'stpes', did you mean 'steps'"):
        config_lib.from_json(Experiment, value)


def test_differences_name_only_fields_that_change_the_mathematics():
    old, new = tiny.get_config("t5"), tiny.get_config("t5")
    new.train.log_every, new.mesh.fsdp, new.data.workers = 7, 8, 2
    assert config_lib.differences(old, new) == []
    new.train.seed, new.objective.noise_density = 3, 0.5
    assert config_lib.differences(old, new) == ["objective.noise_density: 0.15 -> 0.5", "train.seed: 0 -> 3"]


def test_differing_fields_compare_any_number_of_configs():
    configs = [tiny.get_config("t5") for _ in range(3)]
    configs[1].train.seed, configs[2].objective.noise_density = 3, 0.5
    fields = {"objective.noise_density": (0.15, 0.15, 0.5), "train.seed": (0, 3, 0)}
    assert config_lib.differing_fields(configs) == fields and config_lib.differing_fields(configs[:1]) == {}


@pytest.mark.parametrize("steps", [1, 49, 50, 99, 1300, 10**6])
def test_a_run_of_any_length_is_logged_at_fifty_steps_or_more(steps):
    train = TrainConfig(steps=steps)
    assert steps // train.logged_every >= min(steps, 50) and train.logged_every <= 50
    assert TrainConfig(steps=steps, log_every=7).logged_every == 7


def test_a_flag_gives_a_whole_choice():
    source = Choice.parse("TextFiles(path='my/books', valid_fraction=0.05)")
    assert (type(source).__name__, source.path, source.valid_fraction) == ("TextFiles", "my/books", 0.05)


def test_a_flag_gives_choices_within_a_choice():
    source = Choice.parse("SourceMixture(sources=(PythonDocs, TextFiles(path='a')), weights=[1, 2.5])")
    assert source == SourceMixture(sources=(PythonDocs(), TextFiles(path="a")), weights=(1, 2.5))


@pytest.mark.parametrize(
    "text, message",
    [
        ("TextFile(path='x')", "did you mean 'TextFiles'"),
        ("TextFiles(pth='x')", "did you mean 'path'"),
        ("TextFiles('x')", "cannot read"),
        ("TextFiles(path=__import__('os').getcwd())", "cannot read"),
        ("Source", "unknown choice 'Source'"),  # abstract
        ("Records", "unknown choice 'Records'"),  # what several share
        ("TextFiles()", "TextFiles needs a value for 'path'"),
        ("TextFiles(**{'path': 'x'})", "cannot read"),
        ("SourceMixture(sources=(TextFile(path='x'),))", "did you mean 'TextFiles'"),
        ("SourceMixture(sources=(TextFiles(pth='x'),))", "TextFiles has no field 'pth', did you mean 'path'"),
        ("SourceMixture(sources=(TextFiles('x'),))", "cannot read"),
        ("SourceMixture(sources=[__import__('os')])", "cannot read"),
        ("TextFiles(path=3)", "TextFiles.path is 3, it must be of type str"),
        ("MaskedLM(rate='0.15')", "MaskedLM.rate is '0.15', it must be of type"),
        ("NearDuplicates(ngram=True)", "NearDuplicates.ngram is True, it must be of type int"),
        ("my/texts", "cannot read"),
        ("OneEach(buckets=(64, 'x'))", r"OneEach.buckets is \(64, 'x'\), it must be a tuple, each of type int"),
    ],
)
def test_a_flag_that_gives_no_choice_gets_one_line(text, message):
    with pytest.raises(UserError, match=message):
        Choice.parse(text)


@pytest.mark.parametrize(
    "given, message",
    [
        ("texts", r"'texts' is a folder: did you mean TextFiles\(path='texts'\)\?"),
        ("./texts", r"'./texts' is a folder: did you mean TextFiles\(path='./texts'\)\?"),
        ("lines", r"'lines' is a folder: did you mean JsonLines\(path='lines'\)\?"),
        ("lines/a.jsonl", r"'lines/a.jsonl' is a file: did you mean JsonLines\(path='lines/a.jsonl'\)\?"),
        ("table.parquet", r"'table.parquet' is a file: did you mean Parquet\(path='table.parquet'\)\?"),
        ("no/such", r"'no/such' looks like a path but does not exist: did you mean TextFiles\(path='no/such'\)\?"),
        ("TextFile", "unknown Source 'TextFile', did you mean 'TextFiles'"),
        ("TextFiles(pth='texts')", "TextFiles has no field 'pth', did you mean 'path'"),
    ],
)
def test_a_path_where_a_source_is_wanted_says_which_source(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    for path in ("texts/a.txt", "lines/a.jsonl", "table.parquet"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    with pytest.raises(UserError, match=message):
        Source.parse(given)


def test_a_path_where_a_tokenizer_is_wanted_says_which_tokenizers(tmp_path):
    with pytest.raises(UserError, match=r"is a folder: did you mean BPE\(path=.*\) or ByteBPE\(path="):
        Unigram.parse(str(tmp_path))


def test_a_field_that_another_source_has_says_which():
    line = PythonDocs.no_field("config.data.source", "path")
    assert line == (
        "config.data.source is PythonDocs, which has no field 'path'; choices with this field: "
        '--config.data.source="TextFiles(path=...)" '
        "(ArrayRecord, ConllFiles, Csv, HuggingFace, JsonLines, Parquet, SquadFiles, TextFiles, Tsv)"
    )
    assert "did you mean 'valid_fraction'" in TextFiles.no_field("config.data.source", "valid_fractio")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model.family": "enc"}, "config.model.family is 'enc', did you mean 'encoder'"),
        ({"model.num_heads": 5}, "config.model.d_model 32 is not a multiple of config.model.num_heads 5"),
        ({"model.num_kv_heads": 3}, "config.model.num_heads 4 is not a multiple of config.model.num_kv_heads 3"),
        ({"model.dropout_rate": 1.0}, "config.model.dropout_rate is 1.0"),
        ({"train.ema_decay": 1.0}, r"config.train.ema_decay is 1.0, it must be in \(0, 1\)"),
        ({"evaluate.parameters": "ema"}, "config.evaluate.parameters is 'ema', and config.train.ema_decay is None"),
        ({"evaluate.average": 5}, "config.evaluate.average is 5, and config.checkpoint.keep is 2: increase"),
        ({"evaluate.average": -1}, "config.evaluate.average is -1, it must be at least 0"),
        ({"model.attention_dropout_rate": 1.0}, "config.model.attention_dropout_rate is 1.0"),
        ({"train.accumulate": 3}, "config.train.global_batch_size 8 is not a multiple of config.train.accumulate 3"),
        ({"train.steps": 0}, "config.train.steps is 0, it must be at least 1"),
        ({"mesh.slices": 0}, "config.mesh.slices is 0"),
        ({"data.sequence_length": 65}, "65"),  # LearnedPositions(64)
        ({"model.family": "decoder"}, "encoder_decoder"),  # span corruption's only family
        ({"tokenizer.vocab_size": 1000}, "512"),  # rows of the embedding
        ({"model.position": RotaryPositions(fraction=1.5)}, r"position.fraction is 1.5, it must be in \(0, 1\)"),
        ({"model.position": RotaryPositions(fraction=0.1)}, "fraction 0.1 of head dimension 8 is less than one pair"),
        (
            {"model.position": RotaryPositions(scaling=LongRopeScaling((1.0,), (2.0, -1.0)))},
            "scaling.short_factors has 1 numbers, the smallest is 1.0; it must have 4 numbers above 0, one per rotated",
        ),
        (
            {"model.position": SinusoidalPositions(), "model.d_model": 33, "model.head_dim": 8},
            "config.model.d_model is 33, it must be even with SinusoidalPositions",
        ),
        (
            {"model.position": SinusoidalPositions(), "model.embedding_dim": 9},
            "config.model.embedding_dim is 9, it must be even with SinusoidalPositions",
        ),
        ({"model.position": RotaryPositions(no_rotation_every=1)}, "no_rotation_every is 1, it must be at least 2"),
        (
            {"model.family": "decoder", "model.decoder": DecoderSizes(32, 64, 4)},
            "config.model.decoder requires an encoder_decoder, config.model.family is 'decoder': set it to None",
        ),
        (
            {"model.decoder": DecoderSizes(24, 64, 4)},
            "config.model.decoder.d_model is 24 and config.model.d_model is 32, so the stacks cannot share embeddings: "
            "config.model.separate_embeddings is False, set it to True",
        ),
        ({"model.decoder": DecoderSizes(32, 0, 4)}, "config.model.decoder.d_ff is 0, it must be at least 1"),
        (
            {"model.decoder": DecoderSizes(32, 64, 5)},
            "config.model.decoder.d_model 32 is not a multiple of config.model.decoder.num_heads 5",
        ),
        (
            {"model.decoder": DecoderSizes(32, 64, 4, 3)},
            "config.model.decoder.num_heads 4 is not a multiple of config.model.decoder.num_kv_heads 3",
        ),
        (
            {"model.decoder": DecoderSizes(32, 64, 4, head_dim=5), "model.position": RotaryPositions()},
            "require an even head dimension, config.model.decoder.head_dim is 5",
        ),
        ({"model.encoder_window": 8}, "config.model.encoder_window is 8: it must be at least 2, with config.model"),
        (
            {"model.family": "decoder", "model.separate_embeddings": True},
            "separate_embeddings requires an encoder_decoder",
        ),
        ({"schedule": config_lib.MeshConfig()}, r"config.schedule is MeshConfig\(.*\), it must be of kind Schedule \("),
    ],
)
def test_validate_names_the_value_and_the_field(change, message):
    experiment = tiny.get_config("gpt" if "data.sequence_length" in change else "t5")
    for path, value in change.items():
        parent, _, name = path.rpartition(".")
        setattr(validation.get(experiment, parent) if parent else experiment, name, value)
    with pytest.raises(UserError, match=message):
        validation.validate(experiment)


def test_where_nothing_is_read_files_may_be_missing():
    experiment = tiny.get_config("gpt")
    experiment.data.source.path = experiment.tokenizer.path = "/no/such/file"
    with pytest.raises(UserError, match="config.tokenizer.path is .*config.data.source.path is"):
        validation.validate(experiment)
    validation.validate(experiment, files=False)


def test_validate_collects_every_problem():
    experiment = tiny.get_config("t5")
    experiment.train.steps, experiment.model.norm = 0, "batch"
    with pytest.raises(UserError, match="config.model.norm is 'batch'.*config.train.steps is 0"):
        validation.validate(experiment)


def test_every_field_of_a_run_has_a_default_in_its_dataclass():
    without = [
        f"{cls.__name__}.{f.name}"
        for cls in (config_lib.ModelConfig, config_lib.TrainConfig, config_lib.MeshConfig, config_lib.CheckpointConfig)
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    assert without == []


@pytest.mark.parametrize("part, name", [("train", "remat"), ("model", "activation")])
def test_json_with_a_word_that_a_field_does_not_know_names_those_it_does(part, name):
    value = config_lib.to_json(tiny.get_config("gpt"))
    value[part][name] = "x"
    with pytest.raises(UserError, match=f"config.{part}.{name} is 'x', it must be '.*' or '.*'"):
        config_lib.from_json(Experiment, value)


def test_the_type_of_a_field_of_a_run_is_a_base_of_the_classes_that_do_the_work():
    kinds = {f.name: f.type for cls in (Experiment, DataConfig) for f in dataclasses.fields(cls)}
    assert (kinds["source"], kinds["objective"]) == (Source.__base__, Objective.__base__)
    assert (kinds["optimizer"], kinds["schedule"]) == (optim.Optimizer.__base__, optim.Schedule.__base__)


def _fields_without_none(base=Objective):
    """Objectives and tasks with each of their fields that cannot be None."""
    for cls in base.__subclasses__():
        yield from _fields_without_none(cls)
        if dataclasses.is_dataclass(cls) and cls.__module__.startswith("pretrainax."):
            hints = typing.get_type_hints(cls)
            yield from (
                (cls, f.name) for f in dataclasses.fields(cls) if type(None) not in typing.get_args(hints[f.name])
            )


FIELDS = sorted(set(_fields_without_none()), key=lambda pair: (pair[0].__name__, pair[1]))


@pytest.mark.parametrize("cls, name", FIELDS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_none_in_a_field_of_an_objective_that_cannot_be_is_one_line(cls, name):
    """An objective completes the config by its fields: a wrong one must not end in a traceback there."""
    experiment = tiny.get_config("bert")
    experiment.objective = cls(**({"objectives": (), "weights": ()} if cls is ObjectiveMixture else {}))
    setattr(experiment.objective, name, None)
    with pytest.raises(UserError, match=f"config.objective.{name} is None"):
        complete(experiment)


def test_the_objectives_of_that_are_those_of_tasks_too():
    assert {TokenClassification, ObjectiveMixture} <= {cls for cls, _ in FIELDS}
