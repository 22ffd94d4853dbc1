"""Tests loading the weights of a Hugging Face directory into a run, and invalid directories."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from pretrainax import models, zoo
from pretrainax.config import MeshConfig, UserError
from pretrainax.interop import directories
from pretrainax.interop.weights import DirectoryWeights, load_params, open_start, verify_files
from pretrainax.models.heads.base import head_modules
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.sharding.rules import tree_shardings
from pretrainax.zoo.convert import rows_of, to_huggingface
from tests.golden import CASES
from tests.golden.case import needs_transformers, weights
from tests.support.exports import assert_transformers_computes_the_same
from tests.support.huggingface_weights import PUBLISHED, assert_same, stored, write_directory, write_tokenizer
from tests.support.tiers import few


@pytest.fixture
def source(tmp_path):
    return write_directory(tmp_path / "source")


@pytest.mark.parametrize("name", few(PUBLISHED))
def test_each_device_reads_its_part_of_heads_and_widths(name, tmp_path):
    case = CASES[name]
    if any(stack.num_heads % 2 or stack.kv_heads % 2 for stack in case.config.stacks.values()):
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


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "albert", "electra_small", "deberta", "distilbert", "modernbert", "llama3"]
)
def test_a_bare_model_starts_a_run_where_heads_may_be_fresh(name, tmp_path):
    source, config = write_directory(tmp_path / "source", name), CASES[name].config
    family = CASES[name].family.huggingface
    rows = rows_of(family.names(config), models.abstract_params(config))
    heads = {path: row for path, (row, _) in rows.items() if path.split("/")[0] in head_modules(config)}
    assert heads
    gone, base = {row.name for row in heads.values()}, rows["token_embedding/embedding"][0].name.partition(".")[0]
    rename(source, lambda name: None if name in gone else name.removeprefix(f"{base}."))
    architecture = family.class_of(config).replace("ForPreTraining", "Model").replace("ForMaskedLM", "Model")
    change_config(source, architectures=[architecture.replace("ForCausalLM", "Model")])
    with pytest.raises(UserError, match="config.checkpoint.fresh_heads=True"):
        open_start(str(source), config, fresh_heads=False)
    assert open_start(str(source), config, fresh_heads=True).missing_head_paths == list(heads)


def test_fresh_heads_are_drawn_and_the_rest_is_read(source):
    without_heads(source)
    config, asked = CASES["bert"].config, []
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = models.abstract_params(config)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
    wanted = weights(config)

    def fresh(paths):
        asked.extend(paths)
        shapes_of = dict(zip(parameter_names(abstract), jax.tree.leaves(abstract), strict=True))
        return {path: np.full(shapes_of[path].shape, 7.0, np.float32) for path in paths}

    params = load_params(str(source), config, abstract, fresh)
    assert {path.split("/")[0] for path in asked} == {"masked_lm_head", "pair_head", "unembedding"}
    assert "pair_head/dense/kernel" not in asked  # the file has the pooler
    for path, x, y in zip(parameter_names(wanted), jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(x, 7.0 if path in asked else y, err_msg=path)


@pytest.mark.parametrize(
    "lost",
    [
        "bert.encoder.layer.1.output.dense.weight",  # not in a head
        "bert.embeddings.position_embeddings.weight",
        "cls.predictions.transform.dense.bias",  # half of a linear map
    ],
)
def test_a_damaged_file_is_refused_where_heads_may_be_fresh(lost, source):
    rename(source, lambda name: None if name == lost else name)
    with pytest.raises(UserError, match=f"{lost} .* is missing"):
        open_start(str(source), CASES["bert"].config, fresh_heads=True)


def test_a_run_may_have_other_heads_than_its_start(source):
    masked = dataclasses.replace(CASES["electra_small"].config, masked_lm_head=True, replaced_token_head=False)
    discriminator = write_directory(source.parent / "electra", "electra_small")
    with pytest.raises(UserError, match="masked_lm_head is True, there False.*fresh_heads=True initializes heads"):
        open_start(str(discriminator), masked, fresh_heads=False)
    lacking = open_start(str(discriminator), masked, fresh_heads=True).missing_head_paths
    assert {path.split("/")[0] for path in lacking} == {"masked_lm_head", "unembedding"}


@pytest.mark.parametrize("name", ["t5_1_1", "gpt2"])
def test_a_directory_of_another_family_is_one_short_line(name, source):
    family = CASES[name].config.family
    with pytest.raises(UserError) as error:
        open_start(str(source), CASES[name].config, fresh_heads=False)
    assert f"holds BertForPreTraining, of family 'encoder', and config.model.family is '{family}'" in str(error.value)
    assert len(str(error.value)) < 300 + len(str(source))


def test_of_many_fields_that_differ_the_first_are_named(source):
    with pytest.raises(UserError, match="config.model.vocab_size is .*; and [0-9]+ other fields"):
        open_start(str(source), zoo.preset("modernbert_base"), fresh_heads=False)


@pytest.mark.parametrize("name", ["bert-base-uncased", "google-bert/bert-base-uncased"])
def test_a_name_of_the_hub_says_how_it_is_given(name, tmp_path):
    said = f"{name} is no directory here; a model of the Hugging Face Hub is named hf:{name}"
    with pytest.raises(UserError, match=said):
        open_start(name, CASES["bert"].config, fresh_heads=False)
    with pytest.raises(UserError, match=said):
        directories.import_directory(name, str(tmp_path / "run"))


def test_a_path_that_is_not_there_is_no_name_of_the_hub(tmp_path):
    with pytest.raises(UserError, match="is no directory here$"):
        open_start(str(tmp_path / "bert"), CASES["bert"].config, fresh_heads=False)


# --- harmless differences --------------------------------------------------------------------------------------------


def test_of_one_file_and_an_index_the_file_is_read(source, tmp_path):
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))
    said = directories.import_directory(str(source), str(tmp_path / "run"))
    assert said.endswith(
        "model.safetensors was read, as in transformers; the files of model.safetensors.index.json were ignored"
    )


@pytest.mark.parametrize("name", ["bert", "roberta", "albert", "electra_small", "electra_small_generator"])
def test_a_kind_of_positions_that_is_null_is_the_usual_one(name, tmp_path):
    source = write_directory(tmp_path / "source", name)
    change_config(source, position_embedding_type=None)
    DirectoryWeights(str(source))
    change_config(source, position_embedding_type="relative_key")
    with pytest.raises(UserError, match="position_embedding_type 'relative_key'"):
        DirectoryWeights(str(source))


@pytest.mark.parametrize("name", ["electra_small", "deberta_v3"])
def test_a_discriminator_has_no_matrix_to_tie(name, tmp_path):
    source = write_directory(tmp_path / "source", name)
    change_config(source, tie_word_embeddings=False)
    DirectoryWeights(str(source))


@pytest.mark.parametrize("name", ["electra_small_generator", "deberta", "bert", "roberta"])
def test_a_masked_lm_that_is_not_tied_is_refused(name, tmp_path):
    source = write_directory(tmp_path / "source", name)
    change_config(source, tie_word_embeddings=False)
    with pytest.raises(UserError, match="tie_word_embeddings False"):
        DirectoryWeights(str(source))


def test_the_layers_of_gpt_neo_are_said_once(tmp_path):
    source = write_directory(tmp_path / "source", "gpt_neo")
    kinds = json.loads((source / "config.json").read_text())["attention_layers"]
    assert set(kinds) == {"global", "local"}
    change_config(source, attention_layers=["global"] * len(kinds))
    with pytest.raises(UserError, match="attention_types .*, and other attention_layers"):
        DirectoryWeights(str(source))


# --- errors ----------------------------------------------------------------------------------------------------------


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


def rename(source, new_name):
    """Renames the tensors of a file; None removes a tensor."""
    state = {new_name(name): x for name, x in stored(source).items()}
    save(source, {name: x for name, x in state.items() if name is not None})


def bare_and_full_names(source):
    state = stored(source)
    save(source, state | {"embeddings.LayerNorm.bias": state["bert.embeddings.LayerNorm.bias"]})


def old_and_new_names(source):
    state = stored(source)
    save(source, state | {"bert.embeddings.LayerNorm.beta": state["bert.embeddings.LayerNorm.bias"]})


def without_heads(source):
    """Writes the file like BertModel.save_pretrained: names without prefix, and the first part of the pair head."""
    rename(source, lambda name: None if name.startswith("cls.") else name.removeprefix("bert."))
    change_config(source, architectures=["BertModel"])


def another_class(source):
    change_config(source, architectures=["BertLMHeadModel"])


def only_adapters(source):
    (source / "config.json").unlink()
    (source / "adapter_config.json").write_text("{}")
    (source / "model.safetensors").rename(source / "adapter_model.safetensors")


def more_ids_than_rows(source):
    write_tokenizer(source, 120)


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
            r"more is unknown.*LayerNorm.weight is \[7\], expected \[16\].*"
            r"layer.1.output.dense.weight \[16, 48\] is missing.*cls.predictions.bias \[99\] is missing",
        ),
        (extra, "bert.adapter.weight is unknown; more is unknown"),
        (untied, "cls.predictions.decoder.weight differs from bert.embeddings.word_embeddings.weight"),
        (not_finite, r"bert.pooler.dense.bias, cls.predictions.bias hold numbers that are not finite"),
        (truncated, "is incomplete or no safetensors file"),
        (header_flipped, "is incomplete or no safetensors file"),
        (only_pickles, "pytorch_model.bin.*are not supported.*import BertForPreTraining as M.*save_pretrained"),
        (bare_and_full_names, "bert.embeddings.LayerNorm.bias and embeddings.LayerNorm.bias, .* two names of one"),
        (old_and_new_names, "bert.embeddings.LayerNorm.beta and bert.embeddings.LayerNorm.bias, .* two names of one"),
        (
            without_heads,
            r"\(BertModel\) is a model without masked_lm_head/dense, masked_lm_head/norm, pair_head/output, unembedding"
            ": it lacks cls.predictions.bias, .*"
            "fresh_heads=True.*import BertForPreTraining as M",
        ),
        (another_class, "architectures .'BertLMHeadModel'.; supported: .*BertModel"),
        (only_adapters, r"holds adapters \(adapter_config.json\), not a model: merge them"),
        (more_ids_than_rows, "the tokenizer has 121 ids, and the model 99 rows of embeddings"),
        (index_that_leaves, "must be in this directory"),
        (index_of_a_missing_file, "lists b.safetensors, which is missing"),
        (quantized_numbers, "is quantized, which is not supported: cls.predictions.bias is uint8"),
        (quantized_config, "is quantized .quantization_config of config.json."),
        (null_in_config, "config.json has hidden_size null"),
        (text_in_config, "config.json describes no model"),
        (unknown_model, "model_type 'brt', did you mean 'bert'"),
        (no_config, "holds no config.json"),
        (broken_config, "is not a JSON file"),
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
            verify_files(str(tmp_path / "out"))


@needs_transformers
@pytest.mark.parametrize("kind", ["t5", "mt5"])
def test_the_output_matrix_of_a_new_t5_is_a_copy_of_the_embeddings(kind, tmp_path):
    import transformers

    sizes = dict(vocab_size=99, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu")
    theirs = transformers.AutoConfig.for_model(kind, **sizes, tie_word_embeddings=False)
    transformers.AutoModelForSeq2SeqLM.from_config(theirs).save_pretrained(tmp_path / "tied")
    transformers.AutoModel.from_config(theirs).save_pretrained(tmp_path / "bare")
    source = DirectoryWeights(str(tmp_path / "tied"))
    on = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), source.abstract)
    assert_transformers_computes_the_same(tmp_path / "tied", source.config, source.params(abstract))
    assert source.notes() == [
        "lm_head.weight is a copy of shared.weight; transformers ties them, here both are trained"
    ]
    with pytest.raises(UserError, match="is a model without unembedding: it lacks lm_head.weight"):
        DirectoryWeights(str(tmp_path / "bare"))


def test_an_unknown_class_is_named_with_the_classes_that_are_supported(tmp_path):
    source = write_directory(tmp_path / "source", "eurobert")
    state = stored(source)
    save(source, state | {"classifier.weight": np.zeros((2, 3), np.float32)})
    path = source / "config.json"
    path.write_text(path.read_text().replace("EuroBertForMaskedLM", "EuroBertForSequenceClassification"))
    message = (
        "unknown; its class is EuroBertForSequenceClassification, supported: EuroBertForMaskedLM, EuroBertForToken"
    )
    with pytest.raises(UserError, match=message):
        DirectoryWeights(str(source))
