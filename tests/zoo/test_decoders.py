"""Tests the presets of the decoder families, and config.json files of old and current versions of transformers."""

import dataclasses
import pathlib
import tomllib

import pytest

from pretrainax import zoo
from pretrainax.config import (
    LinearScaling,
    LongContextScaling,
    MixtureOfExperts,
    MultiTokenPrediction,
    RotaryPositions,
    UserError,
)
from pretrainax.zoo import deepseek, llama
from pretrainax.zoo.__main__ import count
from pretrainax.zoo.convert import to_huggingface
from tests.golden import CASES, make
from tests.golden.case import needs_transformers, weights

FAMILIES = {
    family.name: family for family in zoo.FAMILIES if family.preset(next(iter(family.sizes))).family == "decoder"
}
ROWS = [(name, variant) for name, family in FAMILIES.items() for variant in family.sizes]

# For the other families, there is no code, or only the code of the release itself.
NOT_IN_TRANSFORMERS = [name for name, family in FAMILIES.items() if family.huggingface is None] + ["DeepSeekMoE"]


def published() -> dict[str, float]:
    """Returns the number of parameters of each row in its ledger: exact (released files) or rounded (paper)."""
    files = dict.fromkeys(zoo.sources_path(FAMILIES[name].prefix + variant) for name, variant in ROWS)
    tables = (tomllib.loads(pathlib.Path(file).read_text())["parameters"] for file in files)
    return {name: number for table in tables for name, number in table.items()}


def test_no_row_is_left_out():
    assert {FAMILIES[name].prefix + variant for name, variant in ROWS} == published().keys()


@pytest.mark.first(30)
@pytest.mark.parametrize("name, number", published().items())
def test_rows_have_the_published_number_of_parameters(name, number):
    # Papers round, and some do not count position embeddings.
    assert count(zoo.preset(name)) == (number if isinstance(number, int) else pytest.approx(number, rel=0.02))


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("name, variant", [row for row in ROWS if row[0] not in NOT_IN_TRANSFORMERS])
def test_transformers_builds_a_model_of_as_many_parameters(name, variant):
    import torch
    import transformers

    config = FAMILIES[name].preset(variant)
    json = FAMILIES[name].huggingface.write_config(config)
    theirs = transformers.AutoConfig.for_model(**json)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert type(model).__name__ == json["architectures"][0]
    buffers = [x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert sum(x.numel() for x in (*model.parameters(), *buffers)) == count(config)


@pytest.mark.first(12)
@needs_transformers
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.family in FAMILIES.values()])
def test_an_export_loads_and_its_config_json_comes_back(name, tmp_path):
    """transformers reads our export and writes the same architecture, and its weights equal ours."""
    import json

    import torch
    import transformers

    config, huggingface = CASES[name].config, CASES[name].family.huggingface
    (tmp_path / "config.json").write_text(json.dumps(huggingface.write_config(config)))
    state = to_huggingface(huggingface.names(config), weights(config))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    if config.experts is not None:
        model = make.read_from_file(model, state)
    else:
        missing, unexpected = model.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()}, strict=False)
        assert not unexpected
        assert set(missing) <= set(huggingface.tied(config))
    model.save_pretrained(tmp_path / "again")
    again = huggingface.read_config(json.loads((tmp_path / "again" / "config.json").read_text()))
    # None and the default that it stands for are equivalent, as in write_config.
    again = dataclasses.replace(again, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
    assert (again.kv_heads, again.dim_per_head) == (config.kv_heads, config.dim_per_head)
    # This field affects only training, and transformers' config.json does not have it.
    if config.experts is not None and config.experts.bias_rate is not None:
        again.experts.bias_rate = config.experts.bias_rate
    training = ("dropout_rate", "attention_dropout_rate", "init_stddev", "scale_residual_init")
    changes = {field: getattr(config, field) for field in training}
    assert dataclasses.replace(again, **changes) == config


# --- config.json as released ---------------------------------------------------------------------------------------

LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN_2_5 = {
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA_1 = {
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}
GEMMA_2 = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA_3 = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GPT_NEO = {
    "activation_function": "gelu_new",
    "attention_dropout": 0,
    "attention_layers": ["global", "local"] * 6,
    "attention_types": [[["global", "local"], 6]],
    "hidden_size": 768,
    "intermediate_size": None,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neo",
    "num_heads": 12,
    "num_layers": 12,
    "vocab_size": 50257,
    "window_size": 256,
}
GPT1 = {
    "afn": "gelu",
    "layer_norm_epsilon": 1e-05,
    "model_type": "openai-gpt",
    "n_ctx": 512,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 512,
    "vocab_size": 40478,
}
RELEASED = {
    "llama3_1_8b": LLAMA_3_1,
    "qwen2_5_0_5b": QWEN_2_5,
    "gemma1_2b": GEMMA_1,
    "gemma2_27b": GEMMA_2,
    "gemma3_1b": GEMMA_3,
    "gpt_neo_125m": GPT_NEO,
    "gpt1_117m": GPT1,
}


BY_TYPE = {family.huggingface.model_type: family.huggingface for family in FAMILIES.values() if family.huggingface}


def read(json):
    return BY_TYPE[json["model_type"]].read_config(json)


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_json_is_the_row(name):
    config, row = read(RELEASED[name]), zoo.preset(name)
    assert (config.kv_heads, config.dim_per_head) == (row.kv_heads, row.dim_per_head)
    same = ("num_kv_heads", "head_dim", "dropout_rate", "attention_dropout_rate", "scale_residual_init")
    assert dataclasses.replace(config, **{field: getattr(row, field) for field in same}) == row


# norm_eps of each released params.json of LLaMA 1. In LLaMA 2 and 3, it is always 1e-05.
NORM_EPS = {"1_7b": 1e-6, "1_13b": 1e-6, "1_33b": 1e-6, "1_65b": 1e-5}


@pytest.mark.parametrize("variant", llama.SIZES)
def test_the_epsilon_of_llama_is_that_of_each_release(variant):
    assert llama.llama(variant).norm_epsilon == NORM_EPS.get(variant, 1e-5)


def test_both_ways_of_writing_rotary_positions_are_read():
    new = {k: v for k, v in LLAMA_3_1.items() if not k.startswith("rope_")}
    new["rope_parameters"] = LLAMA_3_1["rope_scaling"] | {"rope_theta": 500000.0}
    assert read(new) == read(LLAMA_3_1)
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 7.0}
    assert (read(new).position.theta, read(new).position.scaling) == (7.0, None)
    new["rope_parameters"] = {"rope_type": "linear", "factor": 2.0}
    assert (read(new).position.theta, read(new).position.scaling) == (10_000.0, LinearScaling(2.0))
    old = LLAMA_3_1 | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert (read(old).position.theta, read(old).position.scaling) == (500_000.0, LinearScaling(2.0))


def test_both_ways_of_writing_heads_that_turn_in_part_are_read():
    assert read({"model_type": "phi"}).position.fraction == 0.5
    assert read({"model_type": "phi", "partial_rotary_factor": 0.4}).position.fraction == 0.4
    now = {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.25}
    position = read({"model_type": "phi", "rope_parameters": now}).position
    assert (position.fraction, position.theta) == (0.25, 7.0)
    assert read({"model_type": "phi", "partial_rotary_factor": 1.0}).position.fraction is None


def test_both_ways_of_saying_which_layers_turn_are_read():
    json = {"model_type": "smollm3", "num_hidden_layers": 7}
    assert read(json).position.no_rotation_every == 4
    assert read(json | {"no_rope_layer_interval": 2}).position.no_rotation_every == 2
    assert read(json | {"no_rope_layers": [1, 1, 0] * 3}).position.no_rotation_every == 3
    assert read(json | {"no_rope_layers": [1] * 7}).position.no_rotation_every is None
    windowed = read(json | {"use_sliding_window": True, "sliding_window": 5})
    assert (windowed.layer_pattern, windowed.window) == (("global", "global", "global", "local"), 5)


def test_the_context_before_stretching_is_the_context_where_it_is_not_said():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert read(LLAMA_3_1 | {"rope_scaling": scaling}).position.scaling == LongContextScaling(8.0, 1.0, 4.0, 131_072)


def test_both_ways_of_writing_the_layers_of_gemma_3_are_read():
    new = {k: v for k, v in GEMMA_3.items() if not k.startswith(("rope_", "sliding_window_pattern"))}
    new["layer_types"] = (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert read(new) == read(GEMMA_3)
    new["rope_parameters"]["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    assert read(new).position == read(GEMMA_3 | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}).position
    assert read(GEMMA_3 | {"sliding_window_pattern": 2}).layer_pattern == ("local", "global")


def test_windows_of_qwen_begin_where_config_json_says():
    config = read(QWEN_2_5 | {"use_sliding_window": True, "max_window_layers": 22, "sliding_window": 64})
    assert config.layer_pattern == ("global",) * 22 + ("local",) * 2
    assert config.window == 64
    config = read(QWEN_2_5 | {"use_sliding_window": True, "max_window_layers": 24})
    assert (config.layer_pattern, config.window) == (("global",), None)


def test_a_mistral_without_a_window_sees_everything():
    json = {"model_type": "mistral", "sliding_window": None}
    assert (read(json).layer_pattern, read(json).window) == (("global",), None)
    assert (read({"model_type": "mistral"}).layer_pattern, read({"model_type": "mistral"}).window) == (("local",), 4096)


@pytest.mark.parametrize(
    "json, message",
    [
        (LLAMA_3_1 | {"attention_bias": True}, "attention_bias True; 'llama' supports only False"),
        (LLAMA_3_1 | {"mlp_bias": True}, "mlp_bias True; 'llama' supports only False"),
        (
            LLAMA_3_1 | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_type 'dynamic'; allowed: linear",
        ),
        (LLAMA_3_1 | {"rope_scaling": {"type": "linear"}}, r"'linear' without \['factor'\]"),
        (LLAMA_3_1 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA_3_1 | {"rope_scaling": {"full_attention": {}}}, r"each of \['full_attention'\]"),
        (QWEN_2_5 | {"layer_types": ["sliding_attention"] * 24}, "no sliding_window"),
        (QWEN_2_5 | {"layer_types": ["full_attention"] * 23}, "23 layer_types for 24 layers"),
        (QWEN_2_5 | {"layer_types": ["chunked_attention"] * 24}, "chunked_attention"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias True"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 32}, "gives all layers one kind"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers \[0\]; only .* experts in all layers"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        (GEMMA_1 | {"use_bidirectional_attention": True}, "only causal"),
        (GEMMA_1 | {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        (GEMMA_2 | {"use_bidirectional_attention": True}, "only causal"),
        (GEMMA_3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (GEMMA_3 | {"rope_parameters": {"rope_theta": 1.0}}, r"rope_parameters \['rope_theta'\]"),
        (
            GEMMA_3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}},
            "positions of sliding_attention",
        ),
        ({"model_type": "gemma3_text", "text_config": GEMMA_3}, "reads images .* save that alone"),
        (GPT_NEO | {"attention_types": [[["global"], 11]]}, "not 12 layers"),
        (GPT1 | {"afn": "gelu_new"}, "afn 'gelu_new'"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention True"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
            r"rope_type 'longrope' without \['short_factor'\]",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "attention_factor": 1.2}},
            "attention_factor 1.2; only the paper's is supported",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0] * 17 + [1, 1]}, "only every n-th layer"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "2 no_rope_layers for 36 layers"),
        ({"model_type": "smollm3", "attention_bias": True}, "attention_bias True"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm True; 'phi' supports only False"),
    ],
)
def test_what_would_compute_something_else_is_refused(json, message):
    with pytest.raises(UserError, match=message):
        read(json)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("gpt1_117m", {"d_ff": 64}),
        ("gpt1_117m", {"activation": "gelu"}),
        ("gpt2_124m", {"attention_scale": 1.0}),
        ("gpt_neo_125m", {"attention_scale": None}),
        ("gpt_neo_125m", {"qkv_bias": None}),
        ("llama3_8b", {"qkv_bias": True}),
        ("llama3_8b", {"scale_embeddings": True}),
        ("mistral_7b", {"layer_pattern": ("global", "local")}),
        ("mistral_7b", {"experts": MixtureOfExperts()}),
        ("mixtral_8x7b", {"experts": MixtureOfExperts(normalized=False)}),
        ("mixtral_8x7b", {"experts": MixtureOfExperts(d_ff=8)}),
        ("mixtral_8x7b", {"experts": None}),
        ("llama3_8b", {"experts": MixtureOfExperts()}),
        ("qwen2_5_0_5b", {"qk_norm": True}),
        ("qwen3_0_6b", {"norm_at": "both"}),
        ("gemma1_2b", {"attention_scale": 0.1}),
        ("gemma2_2b", {"attention_scale": 0.3}),
        ("gemma3_1b", {"attention_logit_cap": 50.0}),
        ("phi2", {"parallel": False}),
        ("phi2", {"output_bias": None}),
        ("llama3_8b", {"output_bias": True}),
        ("llama3_8b", {"position": RotaryPositions(8192, theta=500_000.0, no_rotation_every=4)}),
        ("phi4_14b", {"qkv_bias": True}),
        ("phi3_3_8b", {"layer_pattern": ("global", "local")}),
    ],
)
def test_what_theirs_cannot_say_is_refused_by_name(name, changes):
    family, variant = zoo.PRESETS[name]
    with pytest.raises(UserError, match=f"cannot express config.model.{next(iter(changes))}="):
        family.huggingface.write_config(dataclasses.replace(family.preset(variant), **changes))


@pytest.mark.parametrize("variant, alpha", [("moe_16b", 0.001), ("v2_lite", 0.001), ("v2", 0.003), ("v3", 0.0001)])
def test_deepseek_adds_up_the_balance_losses_that_pretrainax_averages(variant, alpha):
    config = zoo.preset(f"deepseek_{variant}")
    huggingface = FAMILIES[zoo.PRESETS[f"deepseek_{variant}"][0].name].huggingface
    layers = config.num_layers - config.experts.first_dense
    # 1e-12 covers one product and one quotient of float64.
    assert config.experts.balance_weight == pytest.approx(layers * alpha, rel=1e-12)
    json = huggingface.write_config(config)
    assert json["aux_loss_alpha"] == pytest.approx(alpha, rel=1e-12)
    json |= {"aux_loss_alpha": 0.5, "first_k_dense_replace": 2}
    assert huggingface.read_config(json).experts.balance_weight == pytest.approx(
        0.5 * (config.num_layers - 2), rel=1e-12
    )


def test_the_experts_of_a_multi_token_head_are_layers_of_the_balance_loss_too():
    config = zoo.preset("deepseek_v3")
    config.multi_token = MultiTokenPrediction()
    deepseek.set_balance(config, 0.0001)
    assert config.experts.balance_weight == pytest.approx(59 * 0.0001, rel=1e-12)
