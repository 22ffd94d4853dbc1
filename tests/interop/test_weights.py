"""The weights of a Hugging Face directory in a run, and everything that can be wrong with them."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from pretrainax import models
from pretrainax.config import MeshConfig, UserError
from pretrainax.interop import directories
from pretrainax.interop.weights import DirectoryWeights, load_params
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.rules import tree_shardings
from pretrainax.zoo.convert import to_huggingface
from tests.golden import CASES
from tests.golden.case import weights
from tests.support.huggingface_weights import PUBLISHED, assert_same, stored, write_directory


@pytest.fixture
def source(tmp_path):
    return write_directory(tmp_path / "source")


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_device_reads_its_part_of_heads_and_widths(name, tmp_path):
    case = CASES[name]
    if case.config.num_heads % 2 or case.config.kv_heads % 2:
        pytest.skip("its heads do not divide by two")
    config, family = dataclasses.replace(case.config, vocab_size=104), case.family.huggingface
    given = weights(config)
    state = to_huggingface(family.names(config), given)
    state |= {key: np.zeros(shape, np.float32) for key, shape in family.zeros(config).items()}
    save(tmp_path, {key: np.ascontiguousarray(x) for key, x in state.items()})
    (tmp_path / "config.json").write_text(json.dumps(family.write_config(config)))
    shapes = models.abstract_params(config)
    spread = tree_shardings(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), shapes)
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, spread)
    params = load_params(str(tmp_path), config, abstract)
    assert any("tensor" in str(x.sharding.spec) for x in jax.tree.leaves(params))
    assert_same(jax.device_get(params), given)


@pytest.mark.parametrize("name", ["llama3", "bert", "t5_1_1"])
def test_each_device_reads_its_shards(name, tmp_path):
    source = write_directory(tmp_path / "source", name)
    config = CASES[name].config
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    shapes = models.abstract_params(config)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, tree_shardings(mesh, shapes)
    )
    params = load_params(str(source), config, abstract)
    assert_same(jax.device_get(params), weights(config))
    assert jax.tree.map(lambda x: x.sharding, params) == jax.tree.map(lambda x: x.sharding, abstract)


def test_another_architecture_is_refused_by_field(source):
    config = dataclasses.replace(CASES["bert"].config, num_layers=5, norm_at="pre")
    with pytest.raises(UserError, match=r"config.model.num_layers is 5, there 3; config.model.norm_at is 'pre'"):
        load_params(str(source), config, None)


def test_a_run_may_do_without_the_pair_head(source):
    config = dataclasses.replace(CASES["bert"].config, pair_head=False)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = models.abstract_params(config)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
    params = load_params(str(source), config, abstract)
    kept = {key: x for key, x in weights(CASES["bert"].config).items() if key != "pair_head"}
    assert_same(params, kept)


# --- what can be wrong -----------------------------------------------------------------------------------------------


def save(source, state):
    safetensors.numpy.save_file(state, source / "model.safetensors", {"format": "pt"})


def missing_misshaped_and_extra(source):
    state = stored(source)
    del state["cls.predictions.bias"], state["bert.encoder.layer.1.output.dense.weight"]
    state["bert.embeddings.LayerNorm.weight"] = np.ones(7, np.float32)
    state["more"] = np.ones(3, np.float32)
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
    state["bert.pooler.dense.bias"] = np.full_like(state["bert.pooler.dense.bias"], np.inf)
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
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))


def quantized_numbers(source):
    state = stored(source)
    save(source, state | {"cls.predictions.bias": np.ones(99, np.uint8)})


def change_config(source, **values):
    described = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(described | values))


def quantized_config(source):
    change_config(source, quantization_config={"quant_method": "fp8"})


def null_in_config(source):
    change_config(source, hidden_size=None)


def text_in_config(source):
    change_config(source, vocab_size="99")


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
            missing_misshaped_and_extra,
            r"more is unknown.*LayerNorm.weight is \[7\], wanted \[16\].*"
            r"layer.1.output.dense.weight \[16, 48\] is missing.*cls.predictions.bias \[99\] is missing",
        ),
        (extra, "bert.adapter.weight is unknown; more is unknown"),
        (untied, "cls.predictions.decoder.weight differs from bert.embeddings.word_embeddings.weight"),
        (not_finite, r"bert.pooler.dense.bias, cls.predictions.bias hold numbers that are not finite"),
        (truncated, "is no whole safetensors file"),
        (header_flipped, "is no whole safetensors file"),
        (only_pickles, "pytorch_model.bin.*are not read.*save_pretrained"),
        (index_that_leaves, "must be one of this directory"),
        (index_of_a_missing_file, "names b.safetensors, which is missing"),
        (quantized_numbers, "is quantized, which is not read: cls.predictions.bias is uint8"),
        (quantized_config, "is quantized .quantization_config of config.json."),
        (null_in_config, "config.json describes no model"),
        (text_in_config, "config.json describes no model"),
        (unknown_model, "model_type 'brt', did you mean 'bert'"),
        (no_config, "holds no config.json"),
        (broken_config, "is no JSON file"),
    ],
)
def test_a_bad_directory_is_one_error(damage, message, source, tmp_path):
    damage(source)
    with pytest.raises(UserError, match=message) as error:
        directories.import_directory(str(source), str(tmp_path / "run"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "checkpoints" / "0").exists()


def test_every_flipped_bit_of_an_export_is_seen(source, tmp_path):
    directories.import_directory(str(source), str(tmp_path / "run"))
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    file = tmp_path / "out" / "model.safetensors"
    good = file.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(good), 20):
        bad = bytearray(good)
        bad[place] ^= 1 << int(place) % 8
        file.write_bytes(bad)
        with pytest.raises(UserError, match="model.safetensors changed"):
            DirectoryWeights(str(tmp_path / "out")).verify()
