"""Exports state the tokens that start and end generation, and imports preserve them."""

import json

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.data.objectives import Denoising, SequenceToSequence, SpanCorruption
from pretrainax.interop import directories
from tests.golden import CASES
from tests.golden.case import needs_transformers
from tests.support.huggingface_weights import stored, write_directory, write_run
from tests.support.released import RELEASED, config_of, write_release

BOS, EOS = 1, 2  # ids of the tokenizer of these tests; its padding id is 0


def described(directory, name="config.json"):
    return json.loads((directory / name).read_text())


def ids_of(config):
    return {name: ids for name, ids in config.items() if name.endswith("_token_id")}


def export(run, to):
    directories.export_workdir(str(run), str(to))
    return described(to), described(to, "generation_config.json")


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "name, objective, start",
    [
        ("bart", Denoising(), EOS),
        ("bart", SequenceToSequence(), 0),
        ("transformer", SequenceToSequence(), 0),
        ("t5_1_1", SpanCorruption(), 0),
        ("mt5", SpanCorruption(), 0),
    ],
)
def test_a_decoder_starts_from_what_it_was_trained_to_start_from(name, objective, start, tmp_path):
    run = write_run(tmp_path / "run", CASES[name].config, objective)
    config, generation = export(run, tmp_path / "out")
    forced = {} if name in ("t5_1_1", "mt5") else {"forced_eos_token_id": EOS}
    ids = {"pad_token_id": 0, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": start, **forced}
    assert ids_of(config) == ids_of(generation) == ids


@pytest.mark.first(1)
@needs_transformers
@pytest.mark.parametrize("name, objective", [("bart", Denoising()), ("transformer", None), ("t5_1_1", None)])
def test_transformers_generates_from_there(name, objective, tmp_path):
    import torch
    import transformers

    run = write_run(tmp_path / "run", CASES[name].config, objective)
    config, _ = export(run, tmp_path / "out")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.decoder_start_token_id == config["decoder_start_token_id"]
    written = model.generate(torch.tensor([[BOS, 9, 10, EOS]]), max_new_tokens=3, min_new_tokens=3)
    assert written[0, 0] == config["decoder_start_token_id"]
    assert (written[0, -1] == EOS) == ("forced_eos_token_id" in config)


def test_a_decoder_alone_ends_where_its_tokenizer_says(tmp_path):
    config, generation = export(write_run(tmp_path / "run", CASES["llama3"].config), tmp_path / "out")
    assert ids_of(config) == {"pad_token_id": 0, "bos_token_id": BOS, "eos_token_id": EOS}
    assert generation == {"_from_model_config": True} | ids_of(config)


def test_an_encoder_generates_nothing(tmp_path):
    directories.export_workdir(str(write_run(tmp_path / "run", CASES["bert"].config)), str(tmp_path / "out"))
    assert not (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["t5_1_1", "bart", "llama3"])
def test_ids_of_an_import_are_exported_as_they_came(name, tmp_path):
    source = write_directory(tmp_path / "source", name)
    ids = {"bos_token_id": None, "eos_token_id": [1, 2], "pad_token_id": 3}
    if name != "llama3":
        ids |= {"decoder_start_token_id": 5, "forced_bos_token_id": 6, "forced_eos_token_id": [2]}
    (source / "config.json").write_text(json.dumps(described(source) | ids))
    sampling = {"do_sample": True, "temperature": 0.6, "eos_token_id": [2, 7], "transformers_version": "4.40.0"}
    (source / "generation_config.json").write_text(json.dumps(sampling))
    directories.import_directory(str(source), str(tmp_path / "run"))
    config, generation = export(tmp_path / "run", tmp_path / "out")
    assert ids_of(config) == ids
    assert generation.items() >= sampling.items()
    directories.import_directory(str(tmp_path / "out"), str(tmp_path / "again"))
    assert export(tmp_path / "again", tmp_path / "third") == (config, generation)


@needs_transformers
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_the_settings_of_an_import_are_exported_wherever_they_came_from(file, tmp_path):
    from transformers import GenerationConfig

    source = write_directory(tmp_path / "source", "bart")
    settings = {"num_beams": 4, "no_repeat_ngram_size": 3, "early_stopping": True, "forced_bos_token_id": 0}
    settings |= {"length_penalty": 2.0, "max_length": 142, "min_length": 56, "bad_words_ids": [[3]]}
    content = described(source) if file == "config.json" else {"eos_token_id": 2}
    (source / file).write_text(json.dumps(content | settings))
    assert not (source / "generation_config.json").exists() or file == "generation_config.json"
    directories.import_directory(str(source), str(tmp_path / "run"))
    _, generation = export(tmp_path / "run", tmp_path / "out")
    theirs = GenerationConfig.from_pretrained(str(tmp_path / "out"))
    assert generation.items() >= settings.items()
    assert {name: getattr(theirs, name) for name in settings} == settings


@pytest.mark.first(2)
@pytest.mark.parametrize("name", ["bart", "t5", "opus-mt", "gpt2", "gemma-3"])
def test_a_released_model_goes_through_with_its_ids(name, tmp_path):
    write_release(tmp_path / "source", name)
    directories.import_directory(str(tmp_path / "source"), str(tmp_path / "run"))
    config, generation = export(tmp_path / "run", tmp_path / "out")
    released = ids_of(config_of(name, tiny=True))
    assert ids_of(config).items() >= released.items() and ids_of(generation) == ids_of(config)
    a, b = stored(tmp_path / "source"), stored(tmp_path / "out")
    base = RELEASED[name].base
    assert all(np.array_equal(a[x.removeprefix(base)], b[x]) for x in b if x.removeprefix(base) in a)


def test_bart_without_a_start_has_that_of_its_class(tmp_path):
    source = write_directory(tmp_path / "source", "bart")
    config = {key: value for key, value in described(source).items() if not key.endswith("_token_id")}
    (source / "config.json").write_text(json.dumps(config))
    directories.import_directory(str(source), str(tmp_path / "run"))
    assert export(tmp_path / "run", tmp_path / "out")[0]["decoder_start_token_id"] == 2


def test_positions_that_are_counted_from_another_padding_are_not_exported(tmp_path):
    run = write_run(tmp_path / "run", CASES["roberta"].config, pad_id=0)  # the model counts positions from 1
    with pytest.raises(UserError, match="padding is id 0, and RobertaForMaskedLM of transformers counts positions"):
        directories.export_workdir(str(run), str(tmp_path / "out"))
