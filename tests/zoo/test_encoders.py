"""Tests the encoders after BERT: parameters of each size, valid and rejected fields of config.json."""

import dataclasses

import pytest

from pretrainax import zoo
from pretrainax.config import LearnedPositions, UserError
from pretrainax.zoo import albert, bert, bigbird, eurobert, longformer, modernbert, roberta
from pretrainax.zoo.__main__ import count
from tests.golden.case import needs_transformers

BERT, MACBERT, DISTILBERT = bert.FAMILIES
ROBERTA, XLM_ROBERTA = roberta.FAMILIES
(ALBERT,), (MODERNBERT,), (EUROBERT,) = albert.FAMILIES, modernbert.FAMILIES, eurobert.FAMILIES
(LONGFORMER,), (BIGBIRD,) = longformer.FAMILIES, bigbird.FAMILIES
FAMILIES = (BERT, MACBERT, DISTILBERT, ROBERTA, XLM_ROBERTA, LONGFORMER, BIGBIRD, ALBERT, MODERNBERT, EUROBERT)


# --- sizes ---------------------------------------------------------------------------------------------------------


# Name, number of parameters in transformers (tied matrices count once), published millions.
@pytest.mark.first(12)
@pytest.mark.parametrize(
    "name, parameters, published",
    [
        ("bert_tiny", 4_433_468, 4.4),  # Turc et al. 2019, table 1
        ("bert_mini", 11_267_900, 11.3),
        ("bert_small", 29_058_876, 29.1),
        ("bert_medium", 41_668_412, 41.7),
        ("bert_base", 110_106_428, 110),  # Devlin et al. 2018, section 3; google-research/bert, README.md
        ("bert_large", 336_226_108, 340),
        ("bert_base_cased", 108_932_934, 110),
        ("bert_large_cased", 334_661_958, 340),
        ("bert_base_chinese", 102_882_442, 110),
        ("bert_base_multilingual", 168_055_961, None),
        ("bert_base_multilingual_cased", 178_566_653, None),
        ("macbert_base", 102_882_442, 102),  # ymcui/MacBERT, README.md
        ("macbert_large", 326_597_258, 324),
        ("distilbert_base", 66_985_530, 66),  # Sanh et al. 2019, table 3
        ("distilbert_base_cased", 65_812_036, 65),  # transformers' table of released models
        ("distilbert_base_multilingual_cased", 135_445_755, 134),
        ("roberta_base", 124_697_433, 125),  # fairseq, examples/roberta/README.md
        ("roberta_large", 355_412_057, 355),
        ("longformer_base", 148_711_257, 149),  # transformers, docs/source/en/pretrained_models (of version 3)
        ("longformer_large", 434_653_273, 435),
        ("bigbird_base", 127_520_694, None),  # like transformers' class without its pooler; no published count
        ("bigbird_large", 359_176_374, None),
        ("xlm_roberta_base", 278_295_186, 270),  # Conneau et al. 2019, section 3
        ("xlm_roberta_large", 560_142_482, 550),
        ("albert_base", 11_813_810, 12),  # Lan et al. 2019, table 1
        ("albert_large", 17_847_474, 18),
        ("albert_xlarge", 59_021_490, 60),
        ("albert_xxlarge", 223_158_450, 235),
        ("albert_v1_base", 11_813_810, 12),
        ("albert_v1_large", 17_847_474, 18),
        ("albert_v1_xlarge", 59_021_490, 60),
        ("albert_v1_xxlarge", 223_158_450, 235),
        ("modernbert_base", 149_655_232, 149),  # Warner et al. 2024, section 2.1.3
        ("modernbert_large", 395_881_664, 395),
        ("eurobert_210m", 310_266_624, None),  # the names count only one of the two vocabulary matrices
        ("eurobert_610m", 755_625_600, None),
        ("eurobert_2_1b", 2_403_092_736, None),
        ("neobert_base", 245_136_954, 250),  # Le Breton et al. 2025, table 1
    ],
)
def test_parameters(name, parameters, published):
    assert count(zoo.preset(name)) == parameters
    # Papers round, and some counts are rough: BERT's "110M" is for every vocabulary, and ALBERT's 235M exceeds its own
    # released files by 5 %.
    assert published is None or abs(parameters / (1e6 * published) - 1) < 0.07


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("name", [family.prefix + variant for family in FAMILIES for variant in family.sizes])
def test_transformers_counts_as_many(name):
    import torch
    import transformers

    family, variant = zoo.PRESETS[name]
    json = family.huggingface.write_config(family.preset(variant))
    with torch.device("meta"):
        model = getattr(transformers, json["architectures"][0])(transformers.AutoConfig.for_model(**json))
        model.tie_weights()
    # BigBird's class for masked language modeling has a pooler that nothing uses.
    unread = "bert.pooler" if family is BIGBIRD else "none"
    sizes = [p.numel() for name, p in model.named_parameters() if not name.startswith(unread)]
    assert sum(sizes) == count(family.preset(variant))


# --- config.json ---------------------------------------------------------------------------------------------------


SHAPE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "initializer_range": 0.02,
}
# The released files, as transformers 3 and 4 wrote them.
RELEASED = {
    "bert_base": SHAPE
    | {"architectures": ["BertForPreTraining"], "model_type": "bert", "vocab_size": 30522, "type_vocab_size": 2}
    | {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "layer_norm_eps": 1e-12, "max_position_embeddings": 512},
    "distilbert_base": {
        **{"architectures": ["DistilBertForMaskedLM"], "model_type": "distilbert", "vocab_size": 30522, "dim": 768},
        **{"activation": "gelu", "n_heads": 12, "n_layers": 6, "hidden_dim": 3072, "dropout": 0.1},
        **{"max_position_embeddings": 512, "sinusoidal_pos_embds": False, "tie_weights_": True},
    },
    "roberta_base": SHAPE
    | {"architectures": ["RobertaForMaskedLM"], "model_type": "roberta", "vocab_size": 50265, "type_vocab_size": 1}
    | {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "layer_norm_eps": 1e-5, "max_position_embeddings": 514}
    | {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
    "xlm_roberta_base": SHAPE
    | {"architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta", "vocab_size": 250002}
    | {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "layer_norm_eps": 1e-5, "max_position_embeddings": 514}
    | {"type_vocab_size": 1, "pad_token_id": 1, "output_past": True, "position_embedding_type": "absolute"},
    "longformer_base": SHAPE
    | {"attention_mode": "longformer", "attention_window": [512] * 12, "ignore_attention_mask": False}
    | {"model_type": "longformer", "vocab_size": 50265, "type_vocab_size": 1, "gradient_checkpointing": False}
    | {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "layer_norm_eps": 1e-5, "max_position_embeddings": 4098}
    | {"bos_token_id": 0, "eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 1},
    "bigbird_base": SHAPE
    | {"architectures": ["BigBirdForMaskedLM"], "model_type": "big_bird", "vocab_size": 50358, "type_vocab_size": 2}
    | {"hidden_act": "gelu_new", "hidden_dropout_prob": 0.1, "layer_norm_eps": 1e-12, "max_position_embeddings": 4096}
    | {"attention_type": "block_sparse", "block_size": 64, "num_random_blocks": 3, "rescale_embeddings": False}
    | {"use_bias": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 66},
    "albert_base": SHAPE
    | {"architectures": ["AlbertForPreTraining"], "model_type": "albert", "vocab_size": 30000, "type_vocab_size": 2}
    | {"hidden_act": "gelu_new", "hidden_dropout_prob": 0, "layer_norm_eps": 1e-12, "max_position_embeddings": 512}
    | {"embedding_size": 128, "inner_group_num": 1, "num_hidden_groups": 1, "net_structure_type": 0, "gap_size": 0},
    "modernbert_base": {
        **{"architectures": ["ModernBertForMaskedLM"], "model_type": "modernbert", "vocab_size": 50368},
        **{"hidden_size": 768, "num_hidden_layers": 22, "num_attention_heads": 12, "intermediate_size": 1152},
        **{"hidden_activation": "gelu", "classifier_activation": "gelu", "norm_eps": 1e-5, "local_attention": 128},
        **{"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0},
        **{"attention_bias": False, "mlp_bias": False, "norm_bias": False, "classifier_bias": False},
        **{"decoder_bias": True, "tie_word_embeddings": True, "max_position_embeddings": 8192, "pad_token_id": 50283},
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_config_is_the_preset(name):
    family, variant = zoo.PRESETS[name]
    assert family.huggingface.read_config(RELEASED[name]) == family.preset(variant)


@pytest.mark.parametrize("name", [family.prefix + variant for family in FAMILIES for variant in family.sizes])
def test_a_preset_is_written_and_read_back(name):
    family, variant = zoo.PRESETS[name]
    config = family.preset(variant)
    config.attention_dropout_rate, config.init_stddev = 0.125, 0.01
    config.dropout_rate = 0.0 if family is EUROBERT else 0.25  # its config.json has no dropout
    read = family.huggingface.read_config(family.huggingface.write_config(config))
    assert dataclasses.replace(read, head_dim=None) == config


@pytest.mark.parametrize("name", ["bert_base", "albert_base"])
def test_a_masked_lm_has_no_pair_head(name):
    family, variant = zoo.PRESETS[name]
    architecture = RELEASED[name]["architectures"][0].replace("PreTraining", "MaskedLM")
    config = family.huggingface.read_config(RELEASED[name] | {"architectures": [architecture]})
    assert not config.pair_head
    assert family.huggingface.write_config(config)["architectures"] == [architecture]
    assert not any("pair_head" in row.path for row in family.huggingface.names(config))


@pytest.mark.parametrize("name", RELEASED)
def test_what_config_json_leaves_out_is_as_in_transformers(name):
    transformers = pytest.importorskip("transformers")
    family, _ = zoo.PRESETS[name]
    full = transformers.AutoConfig.for_model(family.huggingface.model_type).to_dict()
    assert family.huggingface.read_config({}) == family.huggingface.read_config(full)


@pytest.mark.parametrize("name", RELEASED)
def test_what_transformers_writes_is_read(name):
    transformers = pytest.importorskip("transformers")
    family, variant = zoo.PRESETS[name]
    theirs = transformers.AutoConfig.for_model(**RELEASED[name]).to_dict()
    assert family.huggingface.read_config(theirs) == family.preset(variant)


@pytest.mark.parametrize(
    "name, changed",
    [
        ("bert_base", {"position_embedding_type": "relative_key"}),
        ("bert_base", {"is_decoder": True}),
        ("bert_base", {"architectures": ["BertLMHeadModel"]}),
        ("bert_base", {"hidden_act": "mish"}),
        ("bert_base", {"tie_word_embeddings": False}),
        ("distilbert_base", {"sinusoidal_pos_embds": True}),
        ("roberta_base", {"hidden_act": "relu"}),
        ("longformer_base", {"attention_window": [512] * 11 + [256]}),
        ("longformer_base", {"attention_window": [512] * 11}),
        ("longformer_base", {"attention_window": 511}),
        ("longformer_base", {"hidden_act": "relu"}),
        ("bigbird_base", {"attention_type": "sparse"}),
        ("bigbird_base", {"rescale_embeddings": True}),
        ("bigbird_base", {"use_bias": False}),
        ("bigbird_base", {"architectures": ["BigBirdForCausalLM"]}),
        ("roberta_base", {"pad_token_id": None}),
        ("albert_base", {"num_hidden_groups": 2}),
        ("albert_base", {"inner_group_num": 2}),
        ("modernbert_base", {"norm_bias": True}),
        ("modernbert_base", {"decoder_bias": False}),
        ("modernbert_base", {"classifier_activation": "silu"}),
        ("modernbert_base", {"layer_types": ["chunked_attention"] * 22}),
        ("modernbert_base", {"layer_types": ["full_attention"] * 21}),
        ("modernbert_base", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("modernbert_base", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}}),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name, changed):
    family, _ = zoo.PRESETS[name]
    with pytest.raises(UserError, match=next(iter(changed))):
        family.huggingface.read_config(RELEASED[name] | changed)


def test_what_transformers_cannot_say_is_refused():
    config = DISTILBERT.preset("base")
    config.norm_epsilon = 1e-5
    with pytest.raises(UserError, match="DistilBertForMaskedLM .* config.model.norm_epsilon=1e-05"):
        DISTILBERT.huggingface.write_config(config)


def test_positions_of_roberta_start_after_the_padding():
    config = ROBERTA.huggingface.read_config({"max_position_embeddings": 130, "pad_token_id": 3})
    assert config.position == LearnedPositions(126, offset=4)
    written = ROBERTA.huggingface.write_config(config)
    assert (written["max_position_embeddings"], written["pad_token_id"]) == (130, 3)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    "types, pattern, window",
    [
        ([FULL, SLIDING, SLIDING, FULL], ("global", "local", "local"), 128),
        # This list is too short to determine the pattern, so the usual pattern applies.
        ([FULL, SLIDING], ("global", "local", "local"), 128),
        ([SLIDING, FULL, SLIDING], ("local", "global"), 128),
        ([SLIDING, SLIDING, FULL], ("local", "local", "global"), 128),
        ([FULL, FULL], ("global",), None),
    ],
)
def test_the_pattern_of_layers_is_read_from_their_list(types, pattern, window):
    config = MODERNBERT.huggingface.read_config({"num_hidden_layers": len(types), "layer_types": types})
    assert (config.layer_pattern, config.window) == (pattern, window)
    assert MODERNBERT.huggingface.write_config(config)["layer_types"] == types


def test_every_layer_of_an_older_file_may_be_global():
    config = MODERNBERT.huggingface.read_config(RELEASED["modernbert_base"] | {"global_attn_every_n_layers": 1})
    assert (config.layer_pattern, config.window) == (("global",), None)
