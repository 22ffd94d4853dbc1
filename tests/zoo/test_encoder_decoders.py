"""Tests encoder-decoders: parameters of each size, valid and rejected fields of config.json, exports."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models, zoo
from pretrainax.config import DecoderSizes, Tag, UserError
from pretrainax.interop.weights import open_start
from pretrainax.layers.compute import Compute
from pretrainax.zoo import bart, st_moe, switch, t5, t5gemma, transformer
from pretrainax.zoo.__main__ import count
from pretrainax.zoo.convert import rows_of, tensor_locations, to_huggingface
from pretrainax.zoo.family import differences
from tests.golden import encoder_decoders, make
from tests.golden.case import batch, needs_transformers, weights

FAMILIES = (*transformer.FAMILIES, *bart.FAMILIES, *t5.FAMILIES, *switch.FAMILIES, *st_moe.FAMILIES, *t5gemma.FAMILIES)
(TRANSFORMER,), (BART,), (T5, _, MT5, BYT5, _) = transformer.FAMILIES, bart.FAMILIES, t5.FAMILIES
(T5GEMMA,), (SWITCH,) = t5gemma.FAMILIES, switch.FAMILIES
CASES = encoder_decoders.CASES


# --- sizes ---------------------------------------------------------------------------------------------------------


# Name, number of parameters in transformers (tied matrices count once), published millions.
SIZES = [
    ("transformer_base", 63_082_496, 65),  # Vaswani et al. 2017, table 3
    ("transformer_big", 214_245_376, 213),
    ("bart_base", 139_420_416, 140),  # fairseq, examples/bart/README.md
    ("bart_large", 406_291_456, 400),
    ("t5_v1_0_small", 60_506_624, 60),  # Raffel et al. 2020, section 3.7
    ("t5_v1_0_base", 222_903_552, 220),
    ("t5_v1_0_large", 737_668_096, 770),
    ("t5_v1_0_3b", 2_851_598_336, 2_800),
    ("t5_v1_0_11b", 11_307_321_344, 11_000),
    # released_checkpoints.md has no counts. Chung et al. 2022, table 2, has the counts of the same sizes.
    ("t5_small", 76_961_152, 77),
    ("t5_base", 247_577_856, 250),
    ("t5_large", 783_150_080, 780),
    ("t5_3b", 2_849_757_184, 3_000),
    ("t5_11b", 11_135_332_352, 11_000),
    ("flan_t5_small", 76_961_152, 80),  # Chung et al. 2022, table 2
    ("flan_t5_base", 247_577_856, 250),
    ("flan_t5_large", 783_150_080, 780),
    ("flan_t5_xl", 2_849_757_184, 3_000),
    ("flan_t5_xxl", 11_135_332_352, 11_000),
    ("mt5_small", 300_176_768, 300),  # Xue et al. 2020, section 3.2
    ("mt5_base", 582_401_280, 580),
    ("mt5_large", 1_229_581_312, 1_200),
    ("mt5_xl", 3_742_619_648, 3_700),
    ("mt5_xxl", 12_921_057_280, 13_000),
    ("byt5_small", 299_637_760, 300),  # Xue et al. 2021, table 1
    ("byt5_base", 581_653_248, 582),
    ("byt5_large", 1_228_183_552, 1_230),
    ("byt5_xl", 3_737_801_728, 3_740),
    ("byt5_xxl", 12_906_899_328, 12_900),
    ("ul2_20b", 19_459_613_696, 20_000),  # Tay et al. 2022, section 5.1
    ("switch_base_8", 619_339_008, 619),  # google-research/t5x, docs/models.md (from memory)
    ("switch_base_16", 1_072_397_568, 1_070),
    ("switch_base_32", 1_978_514_688, 1_980),
    ("switch_base_64", 3_790_748_928, 3_800),
    ("switch_base_128", 7_415_217_408, 7_410),
    ("switch_base_256", 14_664_154_368, 14_700),
    ("switch_large_128", 26_309_291_008, 26_300),
    ("switch_xxl_128", 394_675_073_024, 395_000),
    ("switch_c_2048", 1_571_327_875_360, 1_571_000),
    ("st_moe_l", 4_105_444_352, 4_100),  # Zoph et al. 2022, section 6 (from memory)
    ("st_moe_32b", 269_104_613_376, 269_000),
    ("t5gemma_s_s", 312_517_632, 312.517_632),  # counts of the released files on the hub
    ("t5gemma_b_b", 591_490_560, 591.490_560),
    ("t5gemma_l_l", 1_241_761_792, 1_240),
    ("t5gemma_ml_ml", 2_200_345_344, 2_200.345_344),
    ("t5gemma_xl_xl", 3_766_980_608, 3_766.980_608),
    ("t5gemma_2b_2b", 5_596_853_760, 5_600),
    ("t5gemma_9b_9b", 20_333_401_088, 20_333.401_088),
    ("t5gemma_9b_2b", 12_292_375_296, 12_292.375_296),
]


def test_every_row_is_counted():
    assert {name for name, *_ in SIZES} == {family.prefix + v for family in FAMILIES for v in family.sizes}


@pytest.mark.first(15)
@pytest.mark.parametrize("name, parameters, published", SIZES)
def test_parameters(name, parameters, published):
    assert count(zoo.preset(name)) == parameters
    # Papers round: "3B" is 2.85, and T5's "770M" of 1.0 large is 738.
    assert abs(parameters / (1e6 * published) - 1) < 0.06


# The class in transformers lacks the feed-forward layers or the output matrix of these models.
NOT_SAID = {"switch_xxl_128": "gated", "switch_c_2048": "tie_embeddings"}
SAID = [row for row in SIZES if row[0] not in NOT_SAID and zoo.PRESETS[row[0]][0].huggingface]


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("name, parameters", [row[:2] for row in SAID])
def test_transformers_counts_as_many(name, parameters):
    import torch

    family, variant = zoo.PRESETS[name]
    with torch.device("meta"):
        model = encoder_decoders.fresh(family, family.preset(variant))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == parameters


# --- config.json ---------------------------------------------------------------------------------------------------


T5_LIKE = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True} | {
    "dropout_rate": 0.1,
    "initializer_factor": 1.0,
    "layer_norm_epsilon": 1e-6,
    "relative_attention_num_buckets": 32,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 32_128,
    "d_kv": 64,
    "n_positions": 512,
}
BART_LIKE = {"is_encoder_decoder": True, "activation_function": "gelu", "dropout": 0.1, "init_std": 0.02} | {
    "attention_dropout": 0.1,
    "normalize_before": False,
    "add_final_layer_norm": False,
    "add_bias_logits": False,
    "scale_embedding": False,
    "encoder_layerdrop": 0.0,
}


def stacks(layers: int, d_ff: int, heads: int) -> dict[str, int]:
    sizes = {"layers": layers, "ffn_dim": d_ff, "attention_heads": heads}
    return {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in sizes.items()}


# The released files, as transformers 3 and 4 wrote them.
RELEASED = {
    "t5_v1_0_small": T5_LIKE | {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5_base": T5_LIKE
    | {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12}
    | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "flan_t5_small": T5_LIKE
    | {"d_model": 512, "d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6}
    | {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True}
    | {"tie_word_embeddings": False, "relative_attention_max_distance": 128},
    "mt5_small": T5_LIKE
    | {"architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5", "vocab_size": 250_112, "d_model": 512}
    | {"d_ff": 1024, "num_layers": 8, "num_decoder_layers": 8, "num_heads": 6}
    | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "byt5_small": T5_LIKE
    | {"vocab_size": 384, "d_model": 1472, "d_ff": 3584, "num_layers": 12, "num_decoder_layers": 4, "num_heads": 6}
    | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "gradient_checkpointing": False},
    "ul2_20b": T5_LIKE
    | {"d_model": 4096, "d_ff": 16384, "num_layers": 32, "num_decoder_layers": 32, "num_heads": 16, "d_kv": 256}
    | {"feed_forward_proj": "gated-silu", "dense_act_fn": "silu", "is_gated_act": True},
    "switch_base_8": T5_LIKE
    | {"architectures": ["SwitchTransformersForConditionalGeneration"], "model_type": "switch_transformers"}
    | {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "num_experts": 8}
    | {"feed_forward_proj": "relu", "expert_capacity": 64, "router_type": "tokens_masked", "router_bias": False}
    | {"num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6, "router_z_loss_coef": 0.001},
    "bart_base": BART_LIKE
    | stacks(6, 3072, 12)
    | {"model_type": "bart", "vocab_size": 50_265, "d_model": 768, "max_position_embeddings": 1024}
    | {"normalize_embedding": True, "pad_token_id": 1},
    "bart_large": BART_LIKE
    | stacks(12, 4096, 16)
    | {"model_type": "bart", "vocab_size": 50_265, "d_model": 1024, "max_position_embeddings": 1024}
    | {"normalize_embedding": True, "pad_token_id": 1},
    "transformer_base": BART_LIKE
    | stacks(6, 2048, 8)
    | {"model_type": "marian", "vocab_size": 37_000, "d_model": 512, "max_position_embeddings": 512}
    | {"normalize_embedding": False, "scale_embedding": True, "activation_function": "relu"}
    | {"attention_dropout": 0.0}
    | {"static_position_embeddings": True, "pad_token_id": 36_999, "init_std": 512**-0.5},
}


def released(name):
    """Returns the preset with the dropout and the loss weights that fine-tuning checkpoints state.

    Except in Marian, the dropout applies to attention weights too.
    """
    preset = zoo.preset(name)
    if preset.experts is not None:
        preset.experts.balance_weight = preset.experts.z_weight = 0.001
    return dataclasses.replace(
        preset, dropout_rate=0.1, attention_dropout_rate=0.0 if name == "transformer_base" else 0.1
    )


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_config_is_the_preset(name):
    assert zoo.PRESETS[name][0].huggingface.read_config(RELEASED[name]) == released(name)


@pytest.mark.parametrize("name", [name for name, *_ in SAID])
def test_a_preset_is_written_and_read_back(name):
    family, variant = zoo.PRESETS[name]
    config = dataclasses.replace(family.preset(variant), dropout_rate=0.25, attention_dropout_rate=0.25)
    again = family.huggingface.read_config(family.huggingface.write_config(config))
    assert dataclasses.replace(again, init_stddev=config.init_stddev) == config


# The defaults of SwitchTransformersConfig match no released model: experts in the second of each four layers.
@pytest.mark.parametrize("name", [name for name in RELEASED if not name.startswith("switch")])
def test_what_config_json_leaves_out_is_as_in_transformers(name):
    transformers = pytest.importorskip("transformers")
    huggingface = zoo.PRESETS[name][0].huggingface
    full = transformers.AutoConfig.for_model(huggingface.model_type).to_dict()
    assert huggingface.read_config({}) == huggingface.read_config(full)


@pytest.mark.parametrize("name", RELEASED)
def test_what_transformers_writes_is_read(name):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(**RELEASED[name]).to_dict()
    assert zoo.PRESETS[name][0].huggingface.read_config(theirs) == released(name)


@pytest.mark.parametrize(
    "name, changed",
    [
        ("t5_base", {"feed_forward_proj": "gated-mish"}),
        ("t5_base", {"dense_act_fn": "relu"}),
        ("t5_base", {"is_gated_act": False}),
        ("t5_base", {"is_encoder_decoder": False}),
        ("switch_base_8", {"num_sparse_encoder_layers": 3}),
        ("switch_base_8", {"num_sparse_decoder_layers": 12}),
        ("switch_base_8", {"router_bias": True}),
        ("bart_base", {"decoder_ffn_dim": 1024}),
        ("bart_base", {"decoder_attention_heads": 16}),
        ("bart_base", {"activation_function": "tanh"}),
        ("bart_base", {"tie_word_embeddings": False}),
        ("bart_base", {"normalize_before": True}),
        ("bart_base", {"normalize_embedding": False}),
        ("transformer_base", {"decoder_vocab_size": 36_999}),
        ("transformer_base", {"share_encoder_decoder_embeddings": False}),
        ("transformer_base", {"static_position_embeddings": False}),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name, changed):
    with pytest.raises(UserError, match=next(iter(changed))):
        zoo.PRESETS[name][0].huggingface.read_config(RELEASED[name] | changed)


@pytest.mark.parametrize(
    "family, variant, changes",
    [
        (T5, "base", {"activation": "gelu"}),
        (T5, "base", {"scale_tied_logits": True}),
        (T5, "v1_0_base", {"scale_tied_logits": False}),
        (T5, "base", {"num_kv_heads": 4}),
        (MT5, "base", {"tie_embeddings": True}),
        (SWITCH, "base_8", {"gated": True}),
        (SWITCH, "base_8", {"tie_embeddings": False}),
        (SWITCH, "base_8", {"experts": dataclasses.replace(switch.switch().experts, top_k=2)}),
        (BART, "base", {"norm_epsilon": 1e-12}),
        (BART, "base", {"head_dim": 32}),
        (BART, "base", {"embedding_norm": False}),
        (TRANSFORMER, "base", {"norm_at": "pre"}),
        (T5GEMMA, "b_b", {"separate_embeddings": False}),
        (T5GEMMA, "b_b", {"encoder_window": None}),
        (T5, "base", {"decoder": DecoderSizes(768, 1024, 12)}),
        (BART, "base", {"decoder": DecoderSizes(768, 1024, 12)}),
    ],
)
def test_what_transformers_cannot_say_is_refused(family, variant, changes):
    config = dataclasses.replace(family.preset(variant), **changes)
    with pytest.raises(UserError, match=f"config.model.{next(iter(changes))}="):
        family.huggingface.write_config(config)


@pytest.mark.parametrize("name, field", NOT_SAID.items())
def test_what_the_class_has_not_is_read_and_not_written(name, field):
    preset = zoo.preset(name)
    with pytest.raises(UserError, match=f"cannot express config.model.{field}="):
        SWITCH.huggingface.write_config(preset)
    told = {"feed_forward_proj": "gated-gelu" if preset.gated else "relu", "tie_word_embeddings": False}
    told |= {f"num_sparse_{side}_layers": preset.num_layers // (preset.experts.every or 1) for side in preset.stacks}
    told |= {"num_layers": preset.num_layers, "num_decoder_layers": preset.num_layers}
    read = SWITCH.huggingface.read_config(told)
    assert (read.gated, read.activation, read.tie_embeddings) == (preset.gated, preset.activation, False)
    assert read.experts.every == preset.experts.every


def test_stacks_of_t5gemma_differ_in_sizes_alone():
    read, side = T5GEMMA.huggingface.read_config, {"model_type": "t5_gemma_module", "hidden_size": 768}
    deeper = read({"encoder": side, "decoder": side | {"num_hidden_layers": 4}})
    assert (deeper.num_layers, deeper.num_decoder_layers, deeper.d_model, deeper.decoder) == (26, 4, 768, None)
    narrower = read({"encoder": side, "decoder": side | {"hidden_size": 512, "num_attention_heads": 4}})
    assert (narrower.d_model, narrower.num_heads, narrower.num_decoder_layers) == (768, 8, None)
    assert narrower.decoder == DecoderSizes(d_model=512, d_ff=9216, num_heads=4, num_kv_heads=4, head_dim=256)
    with pytest.raises(UserError, match="differ in norm_epsilon; only num_layers, d_model, .*, head_dim may"):
        read({"encoder": side, "decoder": side | {"rms_norm_eps": 1e-5}})


def test_sizes_of_a_decoder_may_be_said_in_two_ways():
    preset = T5GEMMA.preset("9b_9b")
    of_preset, others = (
        DecoderSizes(3584, 14336, 16, 8, 256),
        (DecoderSizes(2048, 9216, 8), DecoderSizes(2048, 9216, 8, 8, 256)),
    )
    equal, *alike = (dataclasses.replace(preset, decoder=sizes) for sizes in (of_preset, *others))
    assert not differences(preset, equal) and not differences(*alike)
    assert differences(preset, alike[0]) == ["decoder"]


def test_stacks_of_equal_depth_may_be_said_in_two_ways():
    config = BART.huggingface.read_config(stacks(6, 4096, 16))
    assert config.num_decoder_layers is None
    assert BART.huggingface.read_config({"decoder_layers": 3}).num_decoder_layers == 3
    assert BYT5.huggingface.read_config({"num_layers": 9, "num_decoder_layers": 3}).num_decoder_layers == 3
    written = BART.huggingface.write_config(dataclasses.replace(BART.preset("base"), num_decoder_layers=6))
    assert written == BART.huggingface.write_config(BART.preset("base"))


@pytest.mark.slow
@pytest.mark.parametrize("name, dropped", [("t5_1_1", True), ("bart", False), ("transformer", False)])
def test_features_are_dropped_after_a_last_norm_only(name, dropped):
    config = dataclasses.replace(CASES[name].config, dropout_rate=0.5)
    model, arrays = models.build(config, Compute()), jax.tree.map(jnp.asarray, batch(CASES[name]))
    rngs = {"dropout": jax.random.key(0)}
    features = model.apply({"params": weights(config)}, arrays, deterministic=False, rngs=rngs).heads["lm"].features
    assert bool((features == 0).any()) == dropped


# --- files ---------------------------------------------------------------------------------------------------------


def saved(case, folder):
    """Writes the files of an export by hand: zeros, and weights without copies of tied weights."""
    from safetensors.numpy import save_file

    huggingface, config = case.family.huggingface, case.config
    state = to_huggingface(huggingface.names(config), weights(config))
    state |= {name: np.zeros(shape, np.float32) for name, shape in huggingface.zeros(config).items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(huggingface.write_config(config)))


def test_an_encoder_starts_from_the_one_of_two_stacks(tmp_path):
    saved(CASES["t5gemma_9b_2b"], tmp_path)
    config = dataclasses.replace(CASES["t5gemma_9b_2b"].config.stacks["encoder"], head=Tag(num_labels=2))
    assert open_start(str(tmp_path), config, True).missing_head_paths == ["tagger/output/bias", "tagger/output/kernel"]
    with pytest.raises(UserError, match="config.model.d_ff is 40, there 48$"):
        open_start(str(tmp_path), dataclasses.replace(config, d_ff=40), True)


@pytest.mark.first(4)
@needs_transformers
@pytest.mark.parametrize("name", CASES)
def test_from_pretrained_gives_the_logits_of_the_oracle(name, tmp_path):
    import torch
    import transformers

    case = CASES[name]
    saved(case, tmp_path)
    model, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    assert not report["missing_keys"], report["missing_keys"]
    with torch.no_grad():
        expected, got = (make.forward(case, m, batch(case))["logits"] for m in (make.oracle(case), model.eval()))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)  # two runs of the same program


@pytest.mark.first(5)
@needs_transformers
@pytest.mark.parametrize("name", CASES)
def test_what_transformers_saves_is_read(name, tmp_path):
    import transformers
    from safetensors.numpy import load_file

    case, again = CASES[name], tmp_path / "again"
    saved(case, tmp_path)
    transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).save_pretrained(again)
    huggingface, config = case.family.huggingface, case.config
    read = huggingface.read_config(json.loads((again / "config.json").read_text()))
    assert dataclasses.replace(read, init_stddev=config.init_stddev) == config
    rows = rows_of(huggingface.names(read), models.abstract_params(read))
    needed = {name for row, shape in rows.values() for name, _ in tensor_locations(row, shape)}
    assert needed <= load_file(again / "model.safetensors").keys()
