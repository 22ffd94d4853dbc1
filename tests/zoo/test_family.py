"""Tests reading and writing config.json in general, with an example family."""

import dataclasses
import operator

import pytest

from pretrainax import zoo
from pretrainax.config import LearnedPositions, ModelConfig, UserError
from pretrainax.models.electra import discriminator_config
from pretrainax.zoo.family import HuggingFace

FAMILY = HuggingFace(
    model_type="made-up",
    architecture=lambda config: "MadeUpLM" if config.masked_lm_head else "MadeUp",
    base=lambda: ModelConfig(d_model=64, d_ff=128, num_heads=4, dropout_rate=0.1, position=LearnedPositions(32)),
    fields={
        "hidden_size": "d_model",
        "act": "activation",
        "max_positions": "position.max_length",
        "heads": "num_heads",
        "key_heads": "num_kv_heads",
    },
    table=lambda config: [],
    constants={"use_cache_of_old": False},
    nullable=("key_heads",),
    read=lambda json, config: setattr(config, "masked_lm_head", json["architectures"] == ["MadeUpLM"]),
)
JSON = {"model_type": "made-up", "architectures": ["MadeUp"], "hidden_size": 32, "act": "gelu_new", "max_positions": 9}


def test_fields_are_read_and_the_rest_is_the_base():
    config = FAMILY.read_config(JSON)
    assert (config.d_model, config.activation, config.position.max_length) == (32, "gelu_tanh", 9)
    assert (config.d_ff, config.dropout_rate) == (128, 0.1)
    assert FAMILY.read_config({"architectures": []}).position.max_length == 32  # the base is a new object


def test_what_is_written_is_read_back():
    config = ModelConfig(
        d_model=48, d_ff=128, num_heads=4, activation="relu", masked_lm_head=True, position=LearnedPositions(7)
    )
    json = FAMILY.write_config(config)
    assert json == {
        "model_type": "made-up",
        "architectures": ["MadeUpLM"],
        "use_cache_of_old": False,
        "hidden_size": 48,
        "act": "relu",
        "max_positions": 7,
        "heads": 4,
        "key_heads": None,
    }


def test_key_heads_that_are_all_heads_may_be_written_either_way():
    config = ModelConfig(d_model=64, d_ff=128, num_heads=4, num_kv_heads=4, position=LearnedPositions(32))
    assert FAMILY.write_config(config)["key_heads"] == 4


def test_what_would_compute_something_else_is_refused():
    with pytest.raises(UserError, match="use_cache_of_old True; 'made-up' supports only False"):
        FAMILY.read_config(JSON | {"use_cache_of_old": True})
    with pytest.raises(UserError, match="act 'swoosh'; supported: gelu, gelu_fast"):
        FAMILY.read_config(JSON | {"act": "swoosh"})


def test_what_theirs_cannot_say_is_refused_by_name():
    config = ModelConfig(d_model=64, d_ff=256, num_heads=4, norm="rms", position=LearnedPositions(32))
    with pytest.raises(UserError, match=r"cannot express config.model.d_ff=256, config.model.norm='rms'"):
        FAMILY.write_config(config)


def test_training_fields_may_differ():
    config = ModelConfig(d_model=64, d_ff=128, num_heads=4, dropout_rate=0.0, position=LearnedPositions(32))
    assert FAMILY.write_config(config)


@pytest.mark.parametrize("family", [x for x in zoo.FAMILIES if x.huggingface is not None], ids=lambda x: x.name)
def test_each_key_sets_a_field_that_the_base_of_its_family_has(family):
    base = family.huggingface.base()
    for path in family.huggingface.fields.values():
        part, _, name = path.rpartition(".")
        assert hasattr(operator.attrgetter(part)(base) if part else base, name), path


# --- dropout of attention weights, where papers and released code have it ------------------------------------------

DROPPING = {
    **dict.fromkeys(("bert_base", "macbert_base", "distilbert_base", "roberta_base", "xlm_roberta_base"), 0.1),
    **dict.fromkeys(("longformer_base", "bigbird_base"), 0.1),
    **dict.fromkeys(("electra_small", "electra_base", "deberta_v2_xlarge", "deberta_v3_base"), 0.1),
    **dict.fromkeys(("albert_v1_base", "bart_base", "t5_v1_0_base", "gpt1_117m", "gpt2_124m"), 0.1),
    **dict.fromkeys(("albert_base", "t5_base", "mt5_base", "ul2_20b", "gpt3_125m", "gpt_neo_125m"), 0.0),
    **dict.fromkeys(("transformer_base", "modernbert_base", "llama3_1_8b", "mistral_7b", "gemma3_1b"), 0.0),
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_preset_drops_weights_of_attention_as_its_source_does(name):
    assert zoo.preset(name).attention_dropout_rate == DROPPING[name]


KEYS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop", "dropout_rate")


@pytest.mark.parametrize("name", [name for name in DROPPING if zoo.PRESETS[name][0].huggingface is not None])
def test_config_json_says_how_many_weights_of_attention_are_dropped_both_ways(name):
    huggingface = zoo.PRESETS[name][0].huggingface
    config = discriminator_config(zoo.preset(name))
    config = dataclasses.replace(config, dropout_rate=0.25, attention_dropout_rate=0.25)
    json = huggingface.write_config(config)
    (key,) = (key for key in KEYS if key in json)
    assert json[key] == 0.25
    assert huggingface.read_config(json | {key: 0.5}).attention_dropout_rate == 0.5
