"""The end tokens of a model are the ones in generation_config.json or config.json, as in transformers."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import pretrainax
from pretrainax import models
from pretrainax.config import UserError, dump
from pretrainax.config import load as load_config
from pretrainax.inference.inherited import request_of
from pretrainax.inference.request import Sampling
from pretrainax.interop.directories import describe_export, export_workdir, import_directory
from pretrainax.interop.generation import end_tokens
from pretrainax.runs import samples
from pretrainax.scoring.tasks import exact_match
from pretrainax.tasks import Instructions
from pretrainax.tokenization import ByteBPE
from pretrainax.tokenization.base import Vocabulary
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.tokenization.huggingface_export import write_tokenizer
from tests.golden import CASES
from tests.support import tiny
from tests.support.exports import write_run
from tests.support.huggingface_weights import write_directory


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return str(folder)


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"config": {"eos_token_id": 2}}, (2,)),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [2, 11, 2]}}, (2, 11)),
        ({"config": {"eos_token_id": [3, 4]}, "generation_config": {"top_k": 5}}, (3, 4)),
        ({"config": {"eos_token_id": None}}, None),
        ({"config": {}}, None),
        ({}, None),
    ],
)
def test_generation_config_comes_before_config(files, expected, tmp_path):
    assert end_tokens(write(tmp_path, **files), 20) == expected


def test_a_workdir_has_the_files_of_its_import(tmp_path):
    write(tmp_path / "huggingface", config={"eos_token_id": 1}, generation_config={"eos_token_id": [1, 5]})
    assert end_tokens(write(tmp_path, config={"model": {}}), 20) == (1, 5)


@pytest.mark.parametrize("value", [-1, [1, -1], "2", [1.0], [[1]], True])
def test_what_is_not_an_id_is_refused_with_its_value(value, tmp_path):
    folder = write(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(
        UserError, match="generation_config.json: eos_token_id has .*, it must be an id or a list of ids"
    ):
        end_tokens(folder, 20)


@pytest.mark.parametrize("value, expected", [(20, None), ([3, 50256], (3,))])
def test_an_id_that_the_model_lacks_is_ignored_with_a_message(value, expected, tmp_path, capsys):
    assert end_tokens(write(tmp_path, config={"eos_token_id": value}), 20) == expected
    assert "is ignored: the model has ids 0 to 19" in capsys.readouterr().err


def test_a_loaded_model_and_its_import_end_at_each_id(tmp_path):
    directory = write_directory(tmp_path / "gpt2", "gpt2")
    write(tmp_path / "gpt2", generation_config={"eos_token_id": [2, 11]})
    assert pretrainax.load(str(directory)).end_tokens == (2, 11)
    import_directory(str(directory), str(tmp_path / "run"))
    assert pretrainax.load(str(tmp_path / "run")).end_tokens == (2, 11)


@pytest.mark.parametrize("eos, expected", [(None, 3), (5, 5)])
def test_an_export_of_a_decoder_names_the_token_that_ends_its_texts(eos, expected):
    vocabulary = Vocabulary(512, pad=0, unk=1, cls=2, sep=3, mask=4, eos=eos)
    _, config_json, _ = describe_export(tiny.get_config("gpt"), vocabulary)
    assert config_json["eos_token_id"] == expected == vocabulary.separator
    encoder = dataclasses.replace(tiny.get_config("bert"), model=CASES["bert"].config)
    assert describe_export(encoder, vocabulary)[1]["eos_token_id"] == eos


def stops_of_others(loaded, monkeypatch):
    """Returns the stop strings for the samples of a run, and for tasks that compare answers."""
    stops, text = [], SimpleNamespace(text="")
    for module in (samples, exact_match):
        monkeypatch.setattr(module, "generate", lambda *arguments: stops.append(arguments[2].stop) or [text])
    assert [*samples.prompted(loaded, ["Hi"]), *exact_match.ExactMatch()._generate(loaded, ["Hi"])] == ["Hi ⟶ ", ""]
    return stops


CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"


@pytest.mark.parametrize("is_special", [True, False])
def test_a_chat_model_stops_at_the_end_of_its_turn_here_and_in_transformers(is_special, tmp_path, monkeypatch):
    """The vocabulary's EOS is another token, and `generate` of transformers reads only the files of the export."""
    config, folder = tiny.get_config("gpt").model, tmp_path / "tokenizer"
    write_tokenizer(ByteBPE(vocab_size=266).build(iter(["Hi you, it rains"] * 20)), str(folder), config)
    described = json.loads((folder / "tokenizer.json").read_text())
    tokens = [
        described["added_tokens"][0] | {"content": x, "id": i} for i, x in ((266, "<|im_start|>"), (267, "<|im_end|>"))
    ]
    described["added_tokens"] += tokens if is_special else []
    write(folder, tokenizer=described)
    tokenizer = read_tokenizer(str(folder))
    config = dataclasses.replace(config, vocab_size=tokenizer.vocabulary.size)
    (tmp_path / "run").mkdir()
    write_run(
        tmp_path / "run",
        config,
        jax.tree.map(lambda x: np.zeros(x.shape, np.float32), models.abstract_params(config)),
        tokenizer,
    )
    experiment = load_config(str(tmp_path / "run" / "config.json"))
    experiment.objective = Instructions(template=CHATML)
    (tmp_path / "run" / "config.json").write_text(dump(experiment))
    loaded = pretrainax.load(str(tmp_path / "run"))
    assert tokenizer.decode([267]) == "<|im_end|>" if is_special else tokenizer.vocabulary.size == 266
    request = request_of(loaded, {})
    assert request.sampling.stop == ("<|im_end|>",) and request.notes == ["from config.objective: stop '<|im_end|>'"]
    assert request_of(loaded, {"stop": ("x",)}) == (Sampling(stop=("x",)), [])
    assert stops_of_others(loaded, monkeypatch) == [("<|im_end|>",), ("\n", "<|im_end|>")]
    export_workdir(str(tmp_path / "run"), str(tmp_path / "there"))
    stored, eos = json.loads((tmp_path / "there" / "generation_config.json").read_text()), tokenizer.vocabulary.eos
    assert stored["eos_token_id"] == ([267, eos] if is_special else eos)
    warned = list(experiment.objective.adapted(experiment).bind(tokenizer).warnings([]))
    assert any("is not one special token" in line for line in warned) is not is_special
