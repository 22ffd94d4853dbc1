"""Tests the small presets: their sizes, two training steps of each, and their export compared with transformers."""

import pathlib
import runpy

import jax
import pytest

from pretrainax import config as config_lib
from pretrainax import zoo
from pretrainax.config import UserError, resolve_auto
from pretrainax.config.validation import validate
from pretrainax.data.sources import TextFiles
from pretrainax.interop import directories
from pretrainax.interop.architectures import describe_model
from pretrainax.runs.train import train
from pretrainax.scaling import small
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.zoo.__main__ import count
from tests.golden.case import needs_transformers, weights
from tests.support.exports import assert_transformers_computes_the_same, write_workdir
from tests.support.huggingface_weights import params_of
from tests.support.tiers import few

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = ("gpt2", "llama", "bert_base", "modernbert_base", "t5_base")
OTHERS = ("eurobert", "phi", "smollm")  # The table omits the numbers of parameters of these models.
PRESETS = [(name, variant) for name in CONFIGS for variant in small.SIZES]


def load(name, variant):
    return runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"](variant)


@pytest.mark.first(5)
@pytest.mark.parametrize("name, variant", PRESETS)
def test_a_preset_is_sound_and_of_the_size_that_the_table_says(name, variant):
    experiment = load(name, variant)
    validate(experiment)
    resolve_auto(experiment, experiment.tokenizer.size)
    parameters = count(experiment.model) / 1e6
    assert 0.9 <= parameters <= 30
    header, _, *rows = [line.split("|")[1:-1] for line in small.__doc__.splitlines() if line.startswith("|")]
    columns = {"gpt2": "GPT-2", "llama": "LLaMA", "bert_base": "BERT", "modernbert_base": "ModernBERT", "t5_base": "T5"}
    (row,) = [[cell.strip() for cell in row] for row in rows if row[0].strip() == variant]
    assert row[[cell.strip() for cell in header].index(columns[name])] == f"{parameters:.1f} M"
    assert row[1:3] == [str(experiment.model.num_layers), str(experiment.model.d_model)]


@pytest.mark.parametrize("name", few((*CONFIGS, *OTHERS), ["llama", "bert_base", "t5_base"]))
def test_an_unknown_variant_names_the_small_ones(name):
    with pytest.raises(UserError, match="has no variant 'tinyx', .*; small variants for a laptop: tiny, mini, midi"):
        load(name, "tinyx")


def test_no_published_model_has_such_a_name_and_another_size():
    for name, (family, variant) in zoo.PRESETS.items():
        if variant in small.SIZES:
            config, size = family.preset(variant), small.SIZES[variant]
            assert (config.num_layers, config.d_model) == (size.num_layers, size.d_model), name


@pytest.mark.parametrize("variant", small.SIZES)
def test_a_small_bert_has_outputs_as_large_as_those_of_bert_base(variant):
    model, base = load("bert_base", variant).model, load("bert_base", "base").model
    strength = lambda config: config.init_stddev * config.d_model**0.5  # noqa: E731
    assert strength(model) == pytest.approx(strength(base), rel=0.02)  # init_stddev is rounded.


@pytest.mark.parametrize("variant", small.SIZES)
def test_a_small_generator_has_half_the_width_and_heads_of_64(variant):
    model = load("electra_small", variant).model
    generator = model.generator
    assert (generator.d_model, generator.num_layers) == (model.d_model // 2, model.num_layers)
    assert generator.d_model == 64 * generator.num_heads and model.embedding_dim is None


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("name", few((*CONFIGS, *OTHERS), ["llama"]))
def test_a_preset_trains_and_its_export_has_equal_logits_in_transformers(name, tmp_path, text, cache):
    experiment = load(name, "tiny")
    experiment.tokenizer.vocab_size = 400  # The text has 300 words.
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.data.sequence_length = 48
    experiment.train.steps, experiment.train.global_batch_size, experiment.evaluate.batches = 2, 8, 1
    assert train(experiment, str(tmp_path / "run")) == 0
    trained = config_lib.load(str(tmp_path / "run" / "config.json")).model
    assert trained.vocab_size == 512 and trained.position.max_length in (None, 48)
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    assert_transformers_computes_the_same(tmp_path / "out", trained, params_of(tmp_path / "run", trained))


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize(
    ("name", "variant"),
    few([preset for preset in PRESETS if preset[1] != "tiny"], [("modernbert_base", "mini")]),
)
def test_the_larger_ones_have_equal_logits_in_transformers_too(name, variant, tmp_path):
    experiment = load(name, variant)
    resolve_auto(experiment, 400)
    params = weights(experiment.model)  # These weights have a standard deviation of 0.2, which suits a width of 16.
    shrunk = [
        x if name.endswith("scale") else 0.1 * x
        for name, x in zip(parameter_names(params), jax.tree.leaves(params), strict=True)
    ]
    params = jax.tree.unflatten(jax.tree.structure(params), shrunk)
    write_workdir(tmp_path / "run", experiment.model, params)
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    assert_transformers_computes_the_same(tmp_path / "out", experiment.model, params)


def test_the_models_of_nanogpt_take_two_flags():
    experiment = load("gpt2", "midi")
    model = experiment.model
    model.use_bias, model.dropout_rate = False, 0.2
    resolve_auto(experiment, 65)
    shape = (model.num_layers, model.num_heads, model.d_model, model.d_ff, model.position.max_length)
    assert shape == (6, 6, 384, 4 * 384, 256)
    assert describe_model(model, "")[0].model_type == "gpt2"
