"""Tests the model card of an export, and the whole path of a model: training, push to the hub, loading from the hub."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
import yaml

import pretrainax
from pretrainax import config as config_lib
from pretrainax.config import Embed, UserError, ledger
from pretrainax.config.config_file import CONFIGS
from pretrainax.data.sources import HuggingFace
from pretrainax.files.atomic_files import write_atomically
from pretrainax.interop.directories import export_workdir, import_directory
from pretrainax.interop.origin import find_origin
from pretrainax.interop.sentence_transformers import write_modules
from pretrainax.runs import model_card
from pretrainax.runs.model_card import Recipe, write_card
from tests.golden import CASES
from tests.support.fake_hub import hub_server  # noqa: F401
from tests.support.huggingface_weights import write_directory
from tests.support.released import write_release
from tests.support.runs import ENV, TINY, command, exporting, run, write_text

pytestmark = pytest.mark.slow

STEPS = 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a run of a few steps, with a validation at its end."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "secret_place" / "text")
    flags = [f"--config.train.steps={STEPS}", "--config.evaluate.every=2", "--config.checkpoint.every=2"]
    done = run(command(f"{TINY}:gpt", folder / "run", text, folder / "cache", *flags))
    assert done.returncode == 0, done.stderr
    return folder / "run"


def card_of(workdir, to, license=None, recipe=None):
    origin = find_origin(str(workdir))
    export_workdir(origin.directory, str(to), origin.steps, folder=origin.folder)
    write_card(str(to), origin, "me/tiny", license, recipe)
    return (to / "README.md").read_text()


def values(card: str) -> dict[str, str]:
    """Returns the metrics in the card's tables."""
    return dict(re.findall(r"^\| (\w+) \| ([\d.,]+) \|", card, re.MULTILINE))


def test_a_model_goes_to_the_hub_and_comes_back(trained, hub_server, tmp_path, monkeypatch):  # noqa: F811
    env = ENV | {"HF_ENDPOINT": hub_server.url, "HF_TOKEN": "hf_known", "HF_HUB_DISABLE_XET": "1"}
    done = run([*exporting(trained, "")[:-1], "--push=me/tiny", "--license=mit", "--private"], env=env)
    assert done.returncode == 0, done.stderr
    repository = hub_server.repositories["me/tiny"]
    commit = repository.references["main"]
    assert f"pushed to {hub_server.url}/me/tiny as commit {commit[:12]}" in done.stdout and repository.private
    files = repository.commits[commit]
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert not any(b"hf_known" in content for content in files.values()) and "hf_known" not in done.stdout + done.stderr

    monkeypatch.setenv("HF_TOKEN", "hf_known")
    ours, theirs = pretrainax.load(trained), pretrainax.load(f"hf:me/tiny@{commit}")
    assert theirs.origin == f"hf:me/tiny@{commit}"
    tokens = np.arange(1, 17)[None]
    arrays = {"tokens": tokens, "segment_ids": np.ones_like(tokens), "positions": np.arange(16)[None]}
    logits = [
        model.model.apply({"params": jax.device_get(model.params)}, arrays, deterministic=True).heads["lm"].logits()
        for model in (ours, theirs)
    ]
    np.testing.assert_array_equal(*map(np.asarray, logits))  # float32 in both directions: the same numbers

    # A run starts from this model, and records both the name and its commit.
    workdir, name = tmp_path / "more", "hf:me/tiny@main"
    flags = [f"--config.checkpoint.init_from={name}", f"--config.tokenizer=PretrainedTokenizer(path='{name}')"]
    source = trained.parent / "secret_place" / "text"
    env |= {"HF_HOME": str(tmp_path / "home")}
    words = command(f"{TINY}:gpt", workdir, source, tmp_path / "cache", *flags, "--config.train.steps=1")
    done = run(words, env=env)
    assert done.returncode == 0 and f"from {name} (commit {commit[:12]})" in done.stderr + done.stdout, done.stderr
    experiment = config_lib.load(str(workdir / "config.json"))
    assert (experiment.checkpoint.init_from, experiment.tokenizer.path) == (name, name)
    assert json.loads((workdir / "start.json").read_text())["directory"] == f"hf:me/tiny@{commit}"


def test_a_card_says_what_was_measured_of_this_checkpoint(trained, tmp_path):
    card = card_of(trained, tmp_path / "export", "mit")
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    (valid,) = (line for line in lines if line["split"] == "valid" and line["step"] == STEPS)
    said = values(card)
    assert {"loss", "perplexity", "accuracy"} <= said.keys()
    assert all(
        float(said[name].replace(",", "")) == pytest.approx(valid[name], abs=1e-4) for name in ("loss", "accuracy")
    )
    assert f"This is the checkpoint of step {STEPS} of {STEPS}." in card
    assert (tmp_path / "export" / "curves.png").read_bytes() == (trained / "curves.png").read_bytes()
    assert "](curves.png)" in card


def test_a_card_has_what_the_hub_reads(trained, tmp_path):
    _, metadata, card = card_of(trained, tmp_path / "export", "mit").split("---\n", 2)
    assert yaml.safe_load(metadata) == {
        "license": "mit",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pretrainax", "jax", "pretraining"],
    }
    assert "No license is stated" not in card


def test_a_card_names_no_folder_of_the_machine(trained, tmp_path):
    card = card_of(trained, tmp_path / "export")
    assert "TextFiles(path='…/text'" in card and "secret_place" not in card and str(trained.parent) not in card
    assert "No license is stated" in card and "license:" not in card


def test_a_card_has_the_results_of_evaluate_that_are_of_its_checkpoint(trained, tmp_path):
    workdir = shutil.copytree(trained, tmp_path / "run")
    result = {"source": "TextFiles(path='/home/me/other')", "measure": "bits_per_byte", "value": 1.25}
    result |= {
        "standard_error": 0.01,
        "interval": [1.23, 1.27],
        "counts": {"documents": 3},
        "how": "left to right",
        "part": "",
    }
    of = [{"origin": "run, step 4", "step": 4}, {"origin": "run, step 2", "step": 2, "value": 9.5}]
    (workdir / "evaluations").mkdir()
    (workdir / "evaluations" / "text.json").write_text(json.dumps([result | each for each in of]))
    card = card_of(workdir, tmp_path / "export")
    assert "| bits_per_byte | 1.2500 (1.2300 to 1.2700) |" in card and "9.5" not in card
    assert (
        "TextFiles(path='…/other'): left to right; 3 documents." in card
        and "Intervals are 95 % confidence intervals" in card
    )
    (workdir / "evaluations" / "text.json").write_text("{}{")
    shutil.rmtree(tmp_path / "export")
    with pytest.raises(UserError, match=r"text\.json is not a valid result file of pretrainax\.evaluate"):
        card_of(workdir, tmp_path / "export")


def test_a_card_claims_no_figure_of_other_parameters(trained, tmp_path):
    origin = find_origin(f"{trained}@average")
    assert len(origin.steps) == 2
    export_workdir(origin.directory, str(tmp_path / "export"), origin.steps)
    write_card(str(tmp_path / "export"), origin, "me/tiny", None, None)
    card = (tmp_path / "export" / "README.md").read_text()
    assert "No results exist for exactly these parameters." in card and not values(card).keys() & {
        "loss",
        "accuracy",
    }
    assert "the average of the checkpoints of steps 2 and 4" in card


def test_a_manifest_leaves_the_card_to_who_writes_it(trained, tmp_path):
    """Users edit cards on the hub's page, so the checksums cover only the model."""
    card_of(trained, tmp_path / "export")
    (tmp_path / "export" / "README.md").write_text("# Mine")
    pretrainax.load(tmp_path / "export")


def test_a_card_links_what_is_of_the_hub(trained, tmp_path):
    workdir = shutil.copytree(trained, tmp_path / "run")
    experiment = config_lib.load(str(workdir / "config.json"))
    experiment.data.source = HuggingFace(path="org/data", streaming=True)
    write_atomically(str(workdir / "config.json"), config_lib.dump(experiment))
    (workdir / "start.json").write_text(json.dumps({"directory": f"hf:org/base@{'1' * 40}"}))
    _, metadata, card = card_of(workdir, tmp_path / "export").split("---\n", 2)
    described = yaml.safe_load(metadata)
    assert (described["datasets"], described["base_model"]) == (["org/data"], "org/base")
    assert "pretraining" not in described["tags"] and f"It started from `hf:org/base@{'1' * 40}`." in card


def test_a_card_says_where_numbers_come_from(trained, tmp_path):
    experiment = config_lib.load(str(trained / "config.json"))
    compared = ledger.compare(experiment, f"{CONFIGS}/gpt2.toml", "")
    card = card_of(trained, tmp_path / "export", recipe=Recipe("gpt2", compared))
    assert "The config is `gpt2` of PretrainAX" in card
    (width,) = (row for row in compared.rows if row.path == "model.d_model")
    line = f"| `model.d_model` | `32` | set for this run, instead of `{width.fact.value}` ({width.fact.status}: "
    assert line in card and "data.source" not in card.partition("## Recipe")[2]


def test_a_card_shows_no_secret(trained, tmp_path):
    workdir = shutil.copytree(trained, tmp_path / "run")
    experiment = config_lib.load(str(workdir / "config.json"))
    experiment.data.source = HuggingFace(path="org/data", name="hf_abcdefghijklmnopqrstuvwxyz")
    write_atomically(str(workdir / "config.json"), config_lib.dump(experiment))
    card = card_of(workdir, tmp_path / "export")
    assert "HuggingFace(path='org/data', name='***')" in card and "abcdefgh" not in card


def test_a_card_of_an_import_says_that_nothing_is_known_of_its_training(tmp_path):
    layers = write_release(tmp_path / "source", "gpt2").config.num_layers
    import_directory(str(tmp_path / "source"), str(tmp_path / "run"))
    card = card_of(tmp_path / "run", tmp_path / "export")
    assert f"| layers | {layers} |" in card
    assert "It was not trained with PretrainAX." in card and "Its training data is unknown to PretrainAX" in card
    assert "## Training" not in card and "## Config" not in card


def test_an_export_names_the_class_that_loads_its_tokenizer(tmp_path):
    """AutoTokenizer of transformers 5 replaces the pre-tokenizer of a tokenizer.json of a Qwen 2."""
    write_directory(tmp_path / "source", "qwen2")
    import_directory(str(tmp_path / "source"), str(tmp_path / "run"))
    summary = export_workdir(str(tmp_path / "run"), str(tmp_path / "noted"))
    assert summary.endswith("load its tokenizer with PreTrainedTokenizerFast: AutoTokenizer of transformers 5 splits "
                            "text as Qwen 2")  # fmt: skip
    card = card_of(tmp_path / "run", tmp_path / "export")
    assert 'tokenizer = PreTrainedTokenizerFast.from_pretrained("me/tiny")\n' in card and "AutoTokenizer" not in card


def test_a_card_of_an_embedding_model_names_sentence_transformers(tmp_path):
    """transformers would load the model without its pooling."""
    source, head = write_directory(tmp_path / "source"), Embed(pooling="cls", normalize=True)
    write_modules(str(source), dataclasses.replace(CASES["bert"].config, head=head))
    import_directory(str(source), str(tmp_path / "run"))
    _, metadata, card = card_of(tmp_path / "run", tmp_path / "export").split("---\n", 2)
    described = yaml.safe_load(metadata)
    assert (described["library_name"], described["pipeline_tag"]) == ("sentence-transformers", "sentence-similarity")
    assert 'model = SentenceTransformer("me/tiny")\n' in card and "from transformers" not in card


def test_paths_have_their_last_name_alone():
    shown = {
        "TextFiles(path='data/mine/text', valid_path='/a/b/c.txt')": "TextFiles(path='…/text', valid_path='…/c.txt')",
        "HuggingFace(path='org/data')": "HuggingFace(path='org/data')",
        "HuggingFace(path='/home/me/data')": "HuggingFace(path='…/data')",
        "Distillation(teacher='runs/big@best')": "Distillation(teacher='…/big@best')",
        "Distillation(teacher='hf:org/big')": "Distillation(teacher='hf:org/big')",
        "TextFiles(path='here')": "TextFiles(path='here')",
    }
    assert {text: model_card._format_cell(text) for text in shown} == shown
