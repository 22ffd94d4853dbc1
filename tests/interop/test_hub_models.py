"""Tests models of the hub as inputs: released layouts, imports, starts of runs, teachers, tokenizers."""

import json
import os
import pathlib

import jax
import numpy as np
import pytest

import pretrainax
from pretrainax import cli
from pretrainax import config as config_lib
from pretrainax.adapt import LoRA
from pretrainax.checkpoints.manifest import MANIFEST
from pretrainax.config import UserError
from pretrainax.config.overrides import set_field
from pretrainax.config.values import range_problems
from pretrainax.distill import Distillation
from pretrainax.evaluation.command import Evaluation
from pretrainax.huggingface import Exchange
from pretrainax.interop import adapters, directories, start
from pretrainax.interop.origin import find_origin
from pretrainax.interop.teacher import find_teacher
from pretrainax.tokenization import PretrainedTokenizer
from tests.golden.case import weights
from tests.interop.test_adapters import write_adapter
from tests.support.fake_hub import forget
from tests.support.huggingface_weights import assert_same, write_directory
from tests.support.released import write_release
from tests.support.tiny import get_config

NAME = "hf:org/tiny"


def files(directory) -> dict[str, bytes]:
    root = pathlib.Path(directory)
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def sharded(content: dict[str, bytes], directory: pathlib.Path) -> dict[str, bytes]:
    """Converts a model to two files and an index, named as in transformers."""
    import safetensors.numpy

    tensors = safetensors.numpy.load(content.pop("model.safetensors"))
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in parts.items():
        content[file] = safetensors.numpy.save({name: tensors[name] for name in own}, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    content["model.safetensors.index.json"] = json.dumps(index).encode()
    return content


@pytest.fixture(params=["one file", "shards"])
def released(request, hub_server, tmp_path):
    """Commits GPT-2 as released, with other files that people upload, to hf:org/tiny; returns its case."""
    case = write_release(tmp_path / "source", "gpt2")
    content = files(tmp_path / "source")
    content = sharded(content, tmp_path) if request.param == "shards" else content
    hub_server.repository("org/tiny").commit(content | {"pytorch_model.bin": b"\x80", "README.md": b"# GPT-2"})
    return case


def test_a_released_model_is_loaded(released, hub_server, capsys):
    model = pretrainax.load(NAME)
    assert_same(jax.device_get(model.params), weights(released.config))
    commit = hub_server.repositories["org/tiny"].references["main"]
    assert model.origin == f"{NAME} (commit {commit[:12]})" and commit[:12] in capsys.readouterr().err
    assert not any("pytorch_model" in path for path in hub_server.fetched())


def test_an_import_remembers_the_commit(released, hub_server, tmp_path, monkeypatch):
    said = directories.import_directory(NAME, str(tmp_path / "run"))
    assert "parameters imported" in said
    commit = hub_server.repositories["org/tiny"].references["main"]
    known = json.loads((tmp_path / "run" / start.START).read_text())
    assert known["directory"] == f"{NAME}@{commit}" and known["steps"] == []
    assert_same(jax.device_get(pretrainax.load(tmp_path / "run").params), weights(released.config))
    # The branch receives a commit, and the imported commit is still available.
    hub_server.repositories["org/tiny"].commit({"config.json": b"{}"})
    forget(monkeypatch)
    found = start.load_recorded_start(str(tmp_path / "run"))
    assert found.hub == f"{NAME}@{commit}" and os.path.basename(found.directory) == commit


def test_a_config_keeps_the_name_that_was_given(released, hub_server, tmp_path):
    beginning = start.start_model_of(f"{NAME}@main")
    assert beginning.tokenizer.path == f"{NAME}@main"
    experiment = directories.evaluation_of(beginning.model, beginning.tokenizer.load().vocabulary, f"{NAME}@main")
    experiment.checkpoint.init_from = f"{NAME}@main"
    (tmp_path / "config.json").write_text(config_lib.dump(experiment))
    read = config_lib.load(str(tmp_path / "config.json"))
    assert (read.checkpoint.init_from, read.tokenizer.path) == (f"{NAME}@main", f"{NAME}@main")
    assert not any(path.endswith(".safetensors") for path in hub_server.fetched())  # a config needs no weights


def test_a_tokenizer_needs_no_weights(released, hub_server):
    PretrainedTokenizer(path=NAME).load()
    assert hub_server.fetched() and not any(path.endswith(".safetensors") for path in hub_server.fetched())


def test_a_start_is_read_with_its_weights(released):
    origin = find_origin(NAME)
    fit = start.fit_of(origin, released.config, fresh_heads=False)
    assert not fit.missing_head_paths and not fit.unused_paths


def test_an_adapter_names_its_base(hub_server, tmp_path):
    described = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    hub_server.repository("org/adapter").commit({"adapter_config.json": json.dumps(described).encode()})
    with pytest.raises(UserError, match="give it as --base=DIR, or --base=hf:org/base"):
        adapters.import_adapter("hf:org/adapter", None, str(tmp_path / "run"))


@pytest.mark.parametrize("field", ["data.source.path", "data.cache_dir", "checkpoint.local_dir"])
def test_fields_that_are_no_models_take_none(field):
    experiment = get_config("gpt")
    set_field(experiment, f"config.{field}", NAME)
    (problem,) = range_problems(experiment)
    assert (
        problem.startswith(f"config.{field} is '{NAME}': only --from, --base, --compare-with, ") and "--push" in problem
    )


def test_results_of_a_model_of_the_hub_have_a_folder_of_its_name():
    evaluation = Evaluation({})
    evaluation.directory = f"{NAME}@v1"
    assert evaluation._folder() == os.path.join("evaluations", "org--tiny")


def test_a_teacher_of_the_hub_is_found_and_its_absence_is_of_its_field(released, hub_server):
    assert find_teacher(Distillation(teacher=NAME)).hub.startswith(f"{NAME}@")
    with pytest.raises(UserError, match=r"config\.distill\.teacher: hf:org/none: .* has no model org/none"):
        find_teacher(Distillation(teacher="hf:org/none"))


class Held:
    """A flag with its value."""

    def __init__(self, value, present=None):
        self.value = value
        self.present = value is not None if present is None else present


def exchange(monkeypatch, command, workdir, config=None, **given):
    """Runs the command with flags."""
    monkeypatch.setattr(cli, "WORKDIR", Held(str(workdir)))
    monkeypatch.setattr(cli, "CONFIG", Held(config))
    names = ("from", "to", "push", "license", "private", "step", "adapter", "dtype", "part", "base")
    names += ("verify", "check_memory")
    return Exchange({name: Held(given.get(name)) for name in names} | {"shard_gb": Held(5.0, False)}).run(command)


@pytest.mark.parametrize(
    ("command", "given", "config", "message"),
    [
        ("import", {}, None, "import needs --from=DIR"),
        ("export", {}, None, "export needs --to=DIR, or --push=org/name"),
        ("export", {"to": "x", "private": True}, None, "--private is for --push: give --push=org/name"),
        ("export", {"to": "x", "push": "me"}, None, "--push=me: it must be org/name"),
        ("export", {"to": "x", "push": "me/x"}, None, "--push=me/x: no token is set here"),
    ],
)
def test_flags_of_the_exchange_that_do_not_belong_together(command, given, config, message, hub_server, monkeypatch):
    with pytest.raises(UserError, match=message):
        exchange(monkeypatch, command, "run", config, **given)
    assert not hub_server.requests


def test_an_adapter_goes_to_the_hub_as_peft_reads_it_and_comes_back(hub_server, tmp_path, monkeypatch, capsys):
    import huggingface_hub

    write_directory(tmp_path / "source", "gpt2")
    base = hub_server.repository("org/tiny").commit(files(tmp_path / "source"))
    write_adapter(tmp_path / "adapter", "gpt2", LoRA(rank=2))
    adapters.import_adapter(str(tmp_path / "adapter"), NAME, str(tmp_path / "run"))
    monkeypatch.setenv("HF_TOKEN", "hf_known")
    exchange(monkeypatch, "export", tmp_path / "run", adapter=True, push="me/small", license="mit")
    repository = hub_server.repositories["me/small"]
    sent = repository.commits[repository.references["main"]]
    assert set(sent) == {".gitattributes", "README.md", MANIFEST, adapters.CONFIG, adapters.WEIGHTS}
    assert f"as commit {repository.references['main'][:12]}" in capsys.readouterr().out
    described = json.loads(sent[adapters.CONFIG])
    assert (described["base_model_name_or_path"], described["revision"]) == ("org/tiny", base)
    card = huggingface_hub.ModelCard(sent["README.md"].decode())
    assert (card.data.library_name, card.data.base_model, card.data.license) == ("peft", "org/tiny", "mit")
    assert {"lora", "base_model:adapter:org/tiny"} <= set(
        card.data.tags
    ) and card.data.pipeline_tag == "text-generation"
    assert f'GPT2LMHeadModel.from_pretrained("org/tiny", revision="{base}")' in card.text
    assert 'PeftModel.from_pretrained(model, "me/small")' in card.text and str(tmp_path) not in card.text
    adapters.import_adapter("hf:me/small", f"{NAME}@{base}", str(tmp_path / "again"))
    first, again = (pretrainax.load(str(tmp_path / name)).parameters for name in ("run", "again"))
    for path, x in first.items():  # with ranks of zeros added, so the sums have another order
        np.testing.assert_allclose(again[path], x, atol=1e-6, err_msg=path)


def test_the_card_of_an_adapter_of_a_classifier_names_its_class_and_labels(hub_server, tmp_path, monkeypatch):
    """The base model is a BertForPreTraining, in which peft would not find the classifier."""
    import huggingface_hub
    import safetensors.numpy

    write_directory(tmp_path / "source", "bert")
    base = hub_server.repository("org/tiny").commit(files(tmp_path / "source"))
    write_adapter(tmp_path / "adapter", "bert", LoRA(rank=2), task_type="SEQ_CLS", modules_to_save=["classifier"])
    weights_file = tmp_path / "adapter" / adapters.WEIGHTS
    width = json.loads((tmp_path / "source" / "config.json").read_text())["hidden_size"]
    head = {"weight": np.ones((3, width), np.float32), "bias": np.zeros(3, np.float32)}
    tensors = {f"base_model.model.classifier.{name}": x for name, x in head.items()}
    safetensors.numpy.save_file(safetensors.numpy.load_file(weights_file) | tensors, weights_file)
    adapters.import_adapter(str(tmp_path / "adapter"), NAME, str(tmp_path / "run"))
    monkeypatch.setenv("HF_TOKEN", "hf_known")
    exchange(monkeypatch, "export", tmp_path / "run", adapter=True, push="me/small")
    repository = hub_server.repositories["me/small"]
    card = huggingface_hub.ModelCard(repository.commits[repository.references["main"]]["README.md"].decode())
    labels = "num_labels=3, id2label={0: 'LABEL_0', 1: 'LABEL_1', 2: 'LABEL_2'}"  # transformers' default names
    loading = f'BertForSequenceClassification.from_pretrained("org/tiny", revision="{base}", {labels})'
    assert card.data.pipeline_tag == "text-classification" and loading in card.text


def test_an_adapter_for_a_model_that_others_do_not_have_is_not_pushed(hub_server, tmp_path, monkeypatch):
    write_directory(tmp_path / "source", "gpt2")
    write_adapter(tmp_path / "adapter", "gpt2", LoRA(rank=2))
    adapters.import_adapter(str(tmp_path / "adapter"), str(tmp_path / "source"), str(tmp_path / "run"))
    monkeypatch.setenv("HF_TOKEN", "hf_known")
    with pytest.raises(
        UserError, match="which others do not have: start a run from hf:org/name, or leave out --adapter"
    ):
        exchange(monkeypatch, "export", tmp_path / "run", adapter=True, push="me/small")
    assert "me/small" not in hub_server.repositories
