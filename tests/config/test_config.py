"""Tests configs from JSON and from flags, and the messages of `validate`."""

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
    DisentangledPositions,
    Experiment,
    Generator,
    LearnedPositions,
    LinearScaling,
    LongContextScaling,
    LongRopeScaling,
    MixtureOfExperts,
    NoPositions,
    RotaryPositions,
    SinusoidalPositions,
    TrainConfig,
    UserError,
    YarnScaling,
    validation,
)
from pretrainax.config.validation import complete
from pretrainax.data.objectives import (
    FillInTheMiddle,
    MaskedLM,
    Objective,
    ObjectiveMixture,
    ReplacedTokenDetection,
    SpanCorruption,
)
from pretrainax.data.sources import PythonDocs, Source, SourceMixture, TextFiles
from pretrainax.tasks import TokenClassification
from pretrainax.tokenization import BPE, ByteBPE, Characters, Unigram, WordPiece, Words
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
        ("Records", "unknown choice 'Records'"),  # a base class of several sources
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
        ("TextFiles(path=my/texts)", r"write Name or Name\(field=value, ...\), text in quotes$"),
        ("TextFiles(path=texts)", "texts has no quotes: write 'texts' if it is text .*; unknown choice 'texts'$"),
        ("Classification(multi_label=true)", r"true has no quotes: .*\(True, False and None begin with a capital"),
        ("Tsv(path='x', columns=(bestfitt, b))", "bestfitt has no quotes: .*; unknown choice 'bestfitt', did you mean"),
        ("Tsv(path='x', columns='a')", r"columns is 'a', it must be .* such as \('a',\)"),
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
        ({"evaluate.patience": 0}, "config.evaluate.patience is 0, it must be at least 1; None never stops"),
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


SCALING = "config.model.position.scaling"


def scaled(scaling, **position):
    return RotaryPositions(scaling=scaling, **position)


@pytest.mark.parametrize(
    "change, message",
    [
        *(
            ({f"model.{name}": 0.0}, f"config.model.{name} is 0.0, it must be above 0; None disables it")
            for name in ("attention_logit_cap", "final_logit_cap")
        ),
        *(
            ({f"model.{name}": 0.0}, f"config.model.{name} is 0.0, it must be above 0; None selects the default")
            for name in ("attention_scale", "logit_scale", "init_stddev")
        ),
        ({"model.norm_epsilon": -1.0}, "config.model.norm_epsilon is -1.0, it must be at least 0"),
        (
            {"model.num_token_types": -1},
            "config.model.num_token_types is -1, it must be at least 0; "
            "config.model.num_token_types is -1, which requires an encoder: set it to 0",
        ),
        ({"model.head_dim": -4}, "config.model.head_dim is -4, it must be at least 1, or None"),
        ({"model.num_kv_heads": -4}, "config.model.num_kv_heads is -4, it must be at least 1, or None"),
        ({"train.label_smoothing": 1.0}, "config.train.label_smoothing is 1.0, it must be in [0, 1)"),
        ({"train.label_smoothing": -0.1}, "config.train.label_smoothing is -0.1, it must be in [0, 1)"),
        (
            {"model.position": LearnedPositions(64, offset=-3)},
            "config.model.position.offset is -3, it must be at least 0",
        ),
        ({"model.position": scaled(LinearScaling(0.0))}, f"{SCALING}.factor is 0.0, it must be above 0"),
        ({"model.position": scaled(LongContextScaling(-1.0))}, f"{SCALING}.factor is -1.0, it must be above 0"),
        (
            {"model.position": scaled(LongContextScaling(8.0, 4.0, 4.0))},
            f"{SCALING}.low_frequency_factor is 4.0, it must be below {SCALING}.high_frequency_factor, 4.0",
        ),
        ({"model.position": scaled(YarnScaling(0.0))}, f"{SCALING}.factor is 0.0, it must be above 0"),
        (
            {"model.position": scaled(YarnScaling(original_length=0))},
            f"{SCALING}.original_length is 0, it must be above 0",
        ),
        (
            {"model.position": scaled(YarnScaling(slow=32.0))},
            f"{SCALING}.slow is 32.0, it must be below {SCALING}.fast, 32.0",
        ),
        ({"model.position": scaled(YarnScaling(mscale=-1.0))}, f"{SCALING}.mscale is -1.0, it must be at least 0"),
        (
            {"model.position": scaled(YarnScaling(), theta=1.0)},
            "config.model.position.theta is 1, it must not be 1 with YarnScaling",
        ),
        (
            {"model.position": scaled(LongRopeScaling((1.0,) * 4, (2.0,) * 4, factor=0.0))},
            f"{SCALING}.factor is 0.0, it must be above 0",
        ),
        (
            {"model.gate_limit": 7.0},
            "config.model.gate_limit is 7.0, which requires config.model.gated=True: set it to None",
        ),
        (
            {"model.tie_embeddings": False, "model.scale_tied_logits": True},
            "config.model.scale_tied_logits is True, which requires config.model.tie_embeddings=True: set it to False",
        ),
        (
            {"model.qk_norm_heads": "all"},
            "config.model.qk_norm_heads is 'all', which requires config.model.qk_norm=True: set it to 'each'",
        ),
        (
            {"model.norm_starts_stream": True, "model.norm_at": "post"},
            "config.model.norm_starts_stream is True, which requires config.model.norm_at='pre' or 'both': set it to "
            "False",
        ),
        (
            {"model.position": RotaryPositions(local_theta=100.0)},
            "config.model.position.local_theta is 100.0, which requires 'local' in config.model.layer_pattern: set it "
            "to None",
        ),
        (
            {"model.num_token_types": 2},
            "config.model.num_token_types is 2, which requires an encoder: set it to 0",
        ),
        (
            {"model.experts": MixtureOfExperts(group_score="best_two")},
            "config.model.experts.group_score is 'best_two', which requires config.model.experts.groups: set it to "
            "'best'",
        ),
        (
            {"model.experts": MixtureOfExperts(top_k=1)},
            "config.model.experts.normalized is True, and with config.model.experts.top_k 1 all weights are 1, so that "
            "the loss does not train the router: set normalized to False",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_number_out_of_range_or_without_effect_is_one_line(change, message):
    experiment = tiny.get_config("gpt")
    for path, value in change.items():
        parent, _, name = path.rpartition(".")
        setattr(validation.get(experiment, parent), name, value)
    with pytest.raises(UserError) as raised:
        validation.validate(experiment, files=False)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    "generator, change, message",
    [
        (
            Generator(1, 16, 32, 2),
            {"experts": MixtureOfExperts(4)},
            "config.model.generator does not support config.model.experts: set one of them to None",
        ),
        (
            Generator(1, 18, 32, 2),
            {"position": RotaryPositions(64)},
            "rotary positions require an even head dimension, config.model.generator.d_model / num_heads is 9",
        ),
        (
            Generator(1, 16, 32, 2),
            {"position": DisentangledPositions(), "enhanced_mask_decoder": True, "norm_at": "post"},
            "config.model.generator.num_layers is 1, and config.model.enhanced_mask_decoder requires at least 2 layers",
        ),
        (
            Generator(1, 16, 32, 2),
            {"masked_lm_head": True},
            "config.model.masked_lm_head is True, which requires config.model.generator=None: set it to False",
        ),
    ],
    ids=("experts", "rotary", "mask decoder", "masked LM head"),
)
def test_a_generator_is_a_model_of_its_own(generator, change, message):
    experiment = tiny.get_config("bert")
    heads = {"masked_lm_head": False, "replaced_token_head": True}
    experiment.model = dataclasses.replace(experiment.model, generator=generator, **(heads | change))
    experiment.objective = ReplacedTokenDetection()
    with pytest.raises(UserError) as raised:
        validation.validate(experiment, files=False)
    assert str(raised.value) == message


def test_an_encoder_without_positions_is_refused_unless_a_convolution_has_the_order():
    experiment = tiny.get_config("bert")
    experiment.model.position = NoPositions()
    with pytest.raises(UserError, match="position is NoPositions, and without positions an encoder ignores the order"):
        validation.validate(experiment, files=False)
    experiment.model.input_convolution = 3
    validation.validate(experiment, files=False)


def test_a_gate_limit_is_above_zero():
    experiment = tiny.get_config("gpt")
    experiment.model.gated, experiment.model.gate_limit = True, -1.0
    with pytest.raises(UserError, match="config.model.gate_limit is -1.0, it must be above 0; None disables it"):
        validation.validate(experiment, files=False)


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


@pytest.mark.parametrize(
    "tokenizer, objective, problem",
    [
        (ByteBPE(512), MaskedLM(), "no mask and no cls and no sep token, MaskedLM needs"),
        (Characters(), MaskedLM(), "no mask and no cls and no sep token, MaskedLM needs"),
        (Words(512), SpanCorruption(), "no pad token, SpanCorruption needs eos, pad"),
        (Unigram(512, num_sentinels=1), SpanCorruption(), "the tokenizer has 1 sentinels, rows of .* have 2 spans"),
        (BPE(512, special_pieces="albert"), SpanCorruption(), "no eos token, SpanCorruption needs eos, pad"),
        (WordPiece(512), FillInTheMiddle(), "the tokenizer has 0 sentinels, FillInTheMiddle needs 3"),
    ],
)
def test_special_tokens_that_a_tokenizer_will_lack_are_found_before_its_training(tokenizer, objective, problem):
    experiment = tiny.get_config({MaskedLM: "bert", SpanCorruption: "t5"}.get(type(objective), "gpt"))
    experiment.tokenizer, experiment.objective = tokenizer, objective
    with pytest.raises(UserError, match=problem):
        validation.validate(experiment, files=False)
    experiment.tokenizer.path = "a saved tokenizer may have other special tokens"
    validation.validate(experiment, files=False)


def test_special_tokens_for_a_phase_or_the_validation_are_checked_too():
    experiment = tiny.get_config("gpt")
    experiment.phases = (config_lib.Phase(share=0.5), config_lib.Phase(objective=FillInTheMiddle()))
    with pytest.raises(UserError, match="phase 2 of config.phases .*: the tokenizer has 0 sentinels"):
        validation.validate(experiment, files=False)
    experiment.phases, experiment.evaluate.objective = (), FillInTheMiddle()
    with pytest.raises(UserError, match="^the tokenizer has 0 sentinels, FillInTheMiddle needs 3"):
        validation.validate(experiment, files=False)
    experiment.tokenizer.num_sentinels = 3
    validation.validate(experiment, files=False)


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
    """Yields objectives and tasks with each of their fields that cannot be None."""
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
    """Objectives complete the config from their fields, so an invalid field must not raise a traceback there."""
    experiment = tiny.get_config("bert")
    experiment.objective = cls(**({"objectives": (), "weights": ()} if cls is ObjectiveMixture else {}))
    setattr(experiment.objective, name, None)
    with pytest.raises(UserError, match=f"config.objective.{name} is None"):
        complete(experiment)


def test_the_objectives_of_that_are_those_of_tasks_too():
    assert {TokenClassification, ObjectiveMixture} <= {cls for cls, _ in FIELDS}
