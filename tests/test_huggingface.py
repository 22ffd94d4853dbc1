"""Weights of Hugging Face directories: in, out, and everything that can be wrong with them."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from tokenizers import pre_tokenizers

from pretrainax import config as config_lib
from pretrainax import huggingface, models, pretrained, sharding, train
from pretrainax.checkpoint import load_params
from pretrainax.config import MeshConfig, UserError
from pretrainax.data.sources import TextFiles
from pretrainax.huggingface_tokenizer import read_tokenizer
from pretrainax.paths import parameter_names
from pretrainax.zoo.convert import to_huggingface
from tests.golden import CASES
from tests.golden.case import batch, needs_transformers, weights

ROOT = pathlib.Path(__file__).parents[1]
# DeBERTa as its authors pretrain it has no class in transformers that gives its logits.
PUBLISHED = [name for name in CASES if not name.startswith("deberta_v")]


def write_tokenizer(directory, pad_id):
    """A letter a token; enough special ones for every objective."""
    special = ["<s>", "</s>", "<unk>", "<mask>", "[CLS]", "[SEP]"]
    special.insert(pad_id, "<pad>")
    vocabulary = {piece: i for i, piece in enumerate([*special, *"abcdefghijklmnopqrstuvwxyz .,"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict(pad="<pad>", bos="<s>", eos="</s>", unk="<unk>", cls="[CLS]", sep="[SEP]", mask="<mask>")
    named = {f"{name}_token": piece for name, piece in names.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | named))


def write_directory(directory, name="bert", dtype=np.float32):
    """As transformers would save the tiny model of a case, without needing it."""
    case, directory = CASES[name], pathlib.Path(directory)
    directory.mkdir()
    family = case.family.huggingface
    state = to_huggingface(family.names(case.config), weights(case.config))
    state |= {name: np.zeros(shape, np.float32) for name, shape in family.zeros(case.config).items()}
    state = {name: np.ascontiguousarray(x.astype(dtype)) for name, x in state.items()}
    safetensors.numpy.save_file(state, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(family.write_config(case.config)))
    write_tokenizer(directory, case.pad_id)
    return directory


@pytest.fixture
def source(tmp_path):
    return write_directory(tmp_path / "source")


def stored(directory):
    """Every tensor of a directory's files."""
    tensors = {}
    for file in sorted(pathlib.Path(directory).glob("*.safetensors")):
        tensors |= safetensors.numpy.load_file(file)
    return tensors


def params_of(workdir, config):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = models.abstract_params(config)
    return load_params(
        str(workdir), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
    )


def assert_same(a, b):
    for path, x, y in zip(parameter_names(a), jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_import_and_export_keep_every_bit(name, tmp_path):
    source = write_directory(tmp_path / "source", name)
    huggingface.import_directory(str(source), str(tmp_path / "run"))
    imported = config_lib.load(tmp_path / "run" / "config.json").model
    assert_same(params_of(tmp_path / "run", imported), weights(CASES[name].config))
    huggingface.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"), shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    a, b = stored(source), stored(tmp_path / "out")
    assert a.keys() == b.keys()
    assert all(a[key].tobytes() == b[key].tobytes() and a[key].dtype == b[key].dtype for key in a)
    huggingface.import_directory(str(tmp_path / "out"), str(tmp_path / "again"))
    assert_same(params_of(tmp_path / "again", imported), weights(CASES[name].config))


def test_parameters_go_through_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrainax.checkpoint._BLOCK_BYTES", 300)  # of rows, heads and layers, none of which divides
    test_import_and_export_keep_every_bit("t5_1_1", tmp_path)


@needs_transformers
@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_saves_what_we_read_and_loads_what_we_write(name, tmp_path):
    import torch
    import transformers

    from tests.golden import make

    case = CASES[name]
    theirs = make.oracle(case)
    theirs.save_pretrained(tmp_path / "source", max_shard_size="30KB")
    write_tokenizer(tmp_path / "source", case.pad_id)
    huggingface.import_directory(str(tmp_path / "source"), str(tmp_path / "run"))
    huggingface.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    again, info = type(theirs).from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad():
        a, b = (make.forward(case, model.eval(), batch(case)) for model in (theirs, again))
    for key in a:
        # the same program on the same bits; at another address torch may sum in another order
        np.testing.assert_allclose(a[key], b[key], rtol=0, atol=2e-6, err_msg=key)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("a cab.", add_special_tokens=False).input_ids).replace(" ", "") == "acab."


def test_bfloat16_is_kept(tmp_path):
    source = write_directory(tmp_path / "source", "llama3", ml_dtypes.bfloat16)
    huggingface.import_directory(str(source), str(tmp_path / "run"))
    huggingface.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    a, b = stored(source), stored(tmp_path / "out")
    assert {x.dtype.name for x in b.values()} == {"bfloat16"}
    assert all(a[key].tobytes() == b[key].tobytes() for key in a)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    huggingface.export_workdir(str(tmp_path / "run"), str(tmp_path / "wide"), dtype="float32")
    assert all(a[key].astype(np.float32).tobytes() == x.tobytes() for key, x in stored(tmp_path / "wide").items())


def test_two_exports_are_the_same_files(source, tmp_path):
    huggingface.import_directory(str(source), str(tmp_path / "run"))
    for name in ("a", "b"):
        huggingface.export_workdir(str(tmp_path / "run"), str(tmp_path / name))
    a, b = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert a == b


def test_config_and_tokenizer_travel_along(source, tmp_path):
    huggingface.import_directory(str(source), str(tmp_path / "run"))
    huggingface.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    a, b = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    assert a.items() <= (b | {"pad_token_id": a.get("pad_token_id")}).items()
    assert (b["pad_token_id"], b["dtype"]) == (0, "float32")
    assert read_tokenizer(str(source)).fingerprint == read_tokenizer(str(tmp_path / "out")).fingerprint


def test_names_of_a_bare_and_old_file_are_understood(source, tmp_path):
    state = {}
    for name, x in stored(source).items():
        name = name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma")
        state[name.replace("LayerNorm.bias", "LayerNorm.beta")] = x
    safetensors.numpy.save_file(state, source / "model.safetensors")
    huggingface.import_directory(str(source), str(tmp_path / "run"))
    assert_same(params_of(tmp_path / "run", CASES["bert"].config), weights(CASES["bert"].config))


# --- a start for training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "bert", "t5_1_1"])
def test_each_device_reads_its_shards(name, tmp_path):
    source = write_directory(tmp_path / "source", name)
    config = CASES[name].config
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=4))
    shapes = models.abstract_params(config)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, sharding.shardings(mesh, shapes)
    )
    params = pretrained.load_params(str(source), config, abstract)
    assert_same(jax.device_get(params), weights(config))
    assert jax.tree.map(lambda x: x.sharding, params) == jax.tree.map(lambda x: x.sharding, abstract)


def test_another_architecture_is_refused_by_field(source):
    config = dataclasses.replace(CASES["bert"].config, num_layers=5, norm_at="pre")
    with pytest.raises(UserError, match=r"config.model.num_layers is 5, there 3; config.model.norm_at is 'pre'"):
        pretrained.load_params(str(source), config, None)


def test_a_run_may_do_without_the_pair_head(source):
    config = dataclasses.replace(CASES["bert"].config, pair_head=False)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = models.abstract_params(config)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
    params = pretrained.load_params(str(source), config, abstract)
    kept = {key: x for key, x in weights(CASES["bert"].config).items() if key != "pair_head"}
    assert_same(params, kept)


@pytest.mark.parametrize("through", ["directory", "workdir"])
def test_training_goes_on_from_a_directory(through, tmp_path, text, cache):
    source = write_directory(tmp_path / "source", "gpt2")
    huggingface.import_directory(str(source), str(tmp_path / "run"))
    experiment = config_lib.load(tmp_path / "run" / "config.json")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.data.sequence_length, experiment.train.global_batch_size, experiment.train.steps = 16, 8, 2
    experiment.optimizer.learning_rate = 0.0
    experiment.optimizer.weight_decay = 0.0
    experiment.checkpoint.init_from = str(source if through == "directory" else tmp_path / "run")
    assert train.run(experiment, str(tmp_path / "more")) == 0
    assert_same(params_of(tmp_path / "more", experiment.model), weights(CASES["gpt2"].config))
    huggingface.export_workdir(str(tmp_path / "more"), str(tmp_path / "out"))  # what training saved is exported too
    assert all(x.tobytes() == stored(tmp_path / "out")[key].tobytes() for key, x in stored(source).items())


@pytest.mark.parametrize("name", ["bert", "t5_1_1", "gemma2"])
def test_an_imported_workdir_evaluates(name, tmp_path, text, cache):
    source = write_directory(tmp_path / "source", name)
    huggingface.import_directory(str(source), str(tmp_path / "run"))
    experiment = config_lib.load(tmp_path / "run" / "config.json")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.data.sequence_length, experiment.train.global_batch_size, experiment.evaluate.batches = 16, 8, 1
    (tmp_path / "run" / "config.json").write_text(config_lib.dump(experiment))
    done = run(f"--workdir={tmp_path / 'run'}", module="evaluate")
    if name == "t5_1_1":  # whose tokenizer here has no sentinels
        assert done.returncode == 2 and "sentinels" in done.stderr
    else:
        assert done.returncode == 0 and "perplexity" in done.stdout, done.stderr


def test_an_imported_workdir_is_not_resumed(tmp_path, text, cache):
    huggingface.import_directory(str(write_directory(tmp_path / "source", "gpt2")), str(tmp_path / "run"))
    experiment = config_lib.load(tmp_path / "run" / "config.json")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.data.sequence_length, experiment.train.global_batch_size = 16, 8
    os.remove(tmp_path / "run" / "config.json")
    with pytest.raises(UserError, match="holds imported parameters alone.*--config.checkpoint.init_from="):
        train.run(experiment, str(tmp_path / "run"))


# --- what can be wrong -----------------------------------------------------------------------------------------------


def save(source, state):
    safetensors.numpy.save_file(state, source / "model.safetensors", {"format": "pt"})


def missing_and_misshaped(source):
    state = stored(source)
    del state["cls.predictions.bias"], state["bert.encoder.layer.1.output.dense.weight"]
    state["bert.embeddings.LayerNorm.weight"] = np.ones(7, np.float32)
    save(source, state)


def extra(source):
    save(source, stored(source) | {"bert.adapter.weight": np.ones(3, np.float32), "more": np.ones(3, np.float32)})


def untied(source):
    state = stored(source)
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"] + 1
    save(source, state)


def not_finite(source):
    state = stored(source)
    state["cls.predictions.bias"] = state["cls.predictions.bias"].copy()
    state["cls.predictions.bias"][3] = np.nan
    save(source, state)


def truncated(source):
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content[:-10])


def header_flipped(source):
    content = bytearray((source / "model.safetensors").read_bytes())
    content[content.index(b"data_offsets") + 15] ^= 0x10
    (source / "model.safetensors").write_bytes(content)


def only_pickles(source):
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def index_that_leaves(source):
    shutil.move(source / "model.safetensors", source / "a.safetensors")
    index = {"weight_map": {name: "../a.safetensors" for name in safetensors.numpy.load_file(source / "a.safetensors")}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def index_of_a_missing_file(source):
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))


def unknown_model(source):
    (source / "config.json").write_text(json.dumps({"model_type": "brt"}))


def no_config(source):
    (source / "config.json").unlink()


def broken_config(source):
    (source / "config.json").write_text("{")


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            missing_and_misshaped,
            r"LayerNorm.weight is \[7\], wanted \[16\].*layer.1.output.dense.weight \[16, 48\] is missing.*"
            r"cls.predictions.bias \[99\] is missing",
        ),
        (extra, "does not have: bert.adapter.weight, more"),
        (untied, "cls.predictions.decoder.weight differs from bert.embeddings.word_embeddings.weight"),
        (not_finite, "cls.predictions.bias holds numbers that are not finite"),
        (truncated, "is no whole safetensors file"),
        (header_flipped, "is no whole safetensors file"),
        (only_pickles, "pytorch_model.bin.*are not read.*save_pretrained"),
        (index_that_leaves, "must be one of this directory"),
        (index_of_a_missing_file, "names b.safetensors, which is missing"),
        (unknown_model, "model_type 'brt', did you mean 'bert'"),
        (no_config, "holds no config.json"),
        (broken_config, "is no JSON file"),
    ],
)
def test_a_bad_directory_is_one_error(damage, message, source, tmp_path):
    damage(source)
    with pytest.raises(UserError, match=message) as error:
        huggingface.import_directory(str(source), str(tmp_path / "run"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "checkpoints" / "0").exists()


def test_every_flipped_bit_of_an_export_is_seen(source, tmp_path):
    huggingface.import_directory(str(source), str(tmp_path / "run"))
    huggingface.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    file = tmp_path / "out" / "model.safetensors"
    good = file.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(good), 20):
        bad = bytearray(good)
        bad[place] ^= 1 << int(place) % 8
        file.write_bytes(bad)
        with pytest.raises(UserError, match="model.safetensors changed"):
            pretrained.Pretrained(str(tmp_path / "out"))


def test_a_model_that_transformers_has_not_is_not_exported(source, tmp_path):
    huggingface.import_directory(str(source), str(tmp_path / "run"))
    experiment = config_lib.load(tmp_path / "run" / "config.json")
    experiment.model.qk_norm = True
    (tmp_path / "run" / "config.json").write_text(config_lib.dump(experiment))
    with pytest.raises(UserError, match="no architecture of transformers computes this config.model.*qk_norm=True"):
        huggingface.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# --- the command -----------------------------------------------------------------------------------------------------


def run(*words, module="huggingface"):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", f"pretrainax.{module}", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_the_command_imports_and_exports(source, tmp_path):
    done = run("import", f"--from={source}", f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 0 and "parameters imported" in done.stdout, done.stderr
    done = run("export", f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}", "--dtype=bfloat16")
    assert done.returncode == 0 and "as BertForPreTraining" in done.stdout, done.stderr
    assert {x.dtype.name for x in stored(tmp_path / "out").values()} == {"bfloat16"}


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "say what to do first: import or export; got 'nothing'"),
        (("imprt",), "say what to do first: import or export; got 'imprt'"),
        (("import",), "import needs --workdir=DIR"),
        (("export", "--workdir=nowhere", "--to=x"), "holds no config.json"),
    ],
)
def test_a_bad_command_is_one_line(words, message):
    done = run(*words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and message in done.stderr
