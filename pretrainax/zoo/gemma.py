"""Gemma 1, 2 and 3, the language models (Gemma team 2024, arXiv 2403.08295 and 2408.00118; 2025, arXiv 2503.19786).

NOTE transformers and the released code round sqrt(d_model), the scale of the embeddings, to the compute dtype: in
bfloat16, 55.4256 becomes 55.5. This package multiplies in float32 and rounds the result. If the compute dtype is
float32, the embeddings are equal.
"""

from collections.abc import Mapping

from pretrainax.config import LinearScaling, ModelConfig, RotaryPositions, UserError
from pretrainax.zoo import llama, patterns, rotary
from pretrainax.zoo.family import (
    LAST,
    NULLABLE,
    ConfigJson,
    Family,
    HuggingFace,
    TaskClass,
    config_variants,
    token_classification_class,
)
from pretrainax.zoo.variants import pick

# variant -> (layers, width, feed-forward, heads, key heads, head dimension)
SIZES_1 = {
    "1_2b": (18, 2048, 16384, 8, 1, 256),
    "1_7b": (28, 3072, 24576, 16, 16, 256),
}
SIZES_2 = {
    "2_2b": (26, 2304, 9216, 8, 4, 256),
    "2_9b": (42, 3584, 14336, 16, 8, 256),
    "2_27b": (46, 4608, 36864, 32, 16, 128),
}
SIZES_3 = {
    "3_270m": (18, 640, 2048, 4, 1, 256),
    "3_1b": (26, 1152, 6912, 4, 1, 256),
    "3_4b": (34, 2560, 10240, 8, 4, 256),
    "3_12b": (48, 3840, 15360, 16, 8, 256),
    "3_27b": (62, 5376, 21504, 32, 16, 128),
}
SIZES = SIZES_1 | SIZES_2 | SIZES_3


def gemma(variant: str = "2_2b") -> ModelConfig:
    """Builds the model config of Gemma; raises UserError for an unknown variant.

    Args:
      variant: release and size: "2_2b" is the 2B model of Gemma 2.
    """
    *sizes, head_dim = pick("gemma", variant, SIZES)
    fields = {"1": _gemma1_fields, "2": _gemma2_fields, "3": _gemma3_fields}[variant[0]](variant)
    config = llama.decoder(
        *sizes,
        head_dim=head_dim,
        norm="rms_plus_one",
        norm_epsilon=1e-6,
        activation="gelu_tanh",
        scale_embeddings=True,
        tie_embeddings=True,
        **fields,
    )
    if variant in ("2_27b", "3_27b"):
        config.attention_scale = (config.d_model // config.num_heads) ** -0.5  # the other variants use head_dim, 256
    return config


def _gemma1_fields(variant: str) -> dict[str, object]:
    """Returns the ModelConfig fields of Gemma 1.

    The paper's parameter count includes 128 unused embedding rows, which the released file does not have.
    """
    return dict(vocab_size=256_000, position=RotaryPositions(8192))


def _gemma2_fields(variant: str) -> dict[str, object]:
    return dict(
        vocab_size=256_000,
        position=RotaryPositions(8192),
        norm_at="both",
        layer_pattern=("local", "global"),
        window=4096,
        attention_logit_cap=50.0,
        final_logit_cap=30.0,
    )


def _gemma3_fields(variant: str) -> dict[str, object]:
    """Returns the ModelConfig fields of Gemma 3 (section 2).

    The context is 32,768 tokens for the variants 3_270m and 3_1b, and 131,072 tokens for all others.
    """
    is_small = variant in ("3_270m", "3_1b")
    position = RotaryPositions(32_768 if is_small else 131_072, theta=1_000_000.0, local_theta=10_000.0)
    position.scaling = None if is_small else LinearScaling(8.0)
    return dict(
        vocab_size=262_144 if is_small else 262_208,  # includes 64 rows for images
        position=position,
        norm_at="both",
        qk_norm=True,
        layer_pattern=("local",) * 5 + ("global",),
        window=512 if is_small else 1024,
    )


# --- Hugging Face --------------------------------------------------------------------------------------------------


def _base_gemma3() -> ModelConfig:
    """Builds the Gemma 3 config with transformers' defaults, which apply to keys missing from config.json.

    For Gemma 1 and 2, transformers' defaults are the presets 1_7b and 2_2b.
    """
    config = gemma("3_4b")
    config.num_layers, config.d_model, config.d_ff, config.window = 26, 2304, 9216, 4096
    return config


def _check_causal(json: ConfigJson) -> None:
    if json.get("use_bidirectional_attention"):
        raise UserError(
            "config.json has use_bidirectional_attention True; for Gemma only causal attention is supported"
        )


def _read_gemma1(json: ConfigJson, config: ModelConfig) -> None:
    _check_causal(json)
    rotary.read(json, config)
    if json.get("hidden_act") == "gelu":  # the first released files use this value for the tanh approximation
        config.activation = "gelu_tanh"
    if json.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise UserError(
            f"config.json has hidden_activation {json['hidden_activation']!r}; supported: gelu_pytorch_tanh"
        )


def _read_scale(json: ConfigJson, config: ModelConfig) -> None:
    scalar = json.get("query_pre_attn_scalar", 256)
    config.attention_scale = None if scalar == config.dim_per_head else scalar**-0.5


def _write_scale(config: ModelConfig) -> ConfigJson:
    scale = config.attention_scale
    return {"query_pre_attn_scalar": config.dim_per_head if scale is None else round(scale**-2)}


def _read_gemma2(json: ConfigJson, config: ModelConfig) -> None:
    _check_causal(json)
    rotary.read(json, config)
    _read_scale(json, config)
    patterns.read(json, config, otherwise=patterns.kinds(config))


def _read_gemma3(json: ConfigJson, config: ModelConfig) -> None:
    if "text_config" in json:
        raise UserError(
            "config.json is of a Gemma 3 that reads images (it has a text_config); only its language model is "
            "supported: save that alone, as Gemma3ForCausalLM"
        )
    _check_causal(json)
    _read_scale(json, config)
    period = json.get("sliding_window_pattern", 6)
    kinds = ["local" if (i + 1) % period else "global" for i in range(config.num_layers)]
    patterns.read(json, config, otherwise=kinds)
    theta, local_theta = json.get("rope_theta", 1_000_000.0), json.get("rope_local_base_freq", 10_000.0)
    rotary.read_both(json, config, theta, local_theta)


def _write(config: ModelConfig) -> ConfigJson:
    return llama.write_heads(config) | rotary.write(config)


def _write_gemma2(config: ModelConfig) -> ConfigJson:
    return _write(config) | patterns.write(config) | _write_scale(config)


def _write_gemma3(config: ModelConfig) -> ConfigJson:
    local_theta = config.position.local_theta
    return _write_gemma2(config) | {
        "rope_local_base_freq": config.position.theta if local_theta is None else local_theta
    }


_FIELDS = {("hidden_activation" if key == "hidden_act" else key): path for key, path in llama.FIELDS.items()}
_FIELDS |= {"final_logit_softcapping": "final_logit_cap", "sliding_window": "window"}


def _family(release: str, sizes: Mapping[str, object], paper: str, *, architecture: str, **huggingface) -> Family:
    """Builds the family of Gemma release "1", "2" or "3"; `huggingface` holds further `HuggingFace` fields."""
    classifier = architecture.replace("Gemma3For", "Gemma3TextFor").replace("CausalLM", "SequenceClassification")
    return Family(
        name=f"Gemma {release}",
        prefix="gemma",
        preset=gemma,
        sizes=sizes,
        paper=paper,
        objective="causal language modelling" + ", by distillation" * (release != "1"),
        configs=config_variants("gemma", sizes),
        huggingface=HuggingFace(
            architecture=architecture,
            table=llama.huggingface_names,
            sequence_classification_class=TaskClass(classifier, LAST),
            token_classification_class=None if release == "3" else token_classification_class(architecture, "score"),
            nullable=tuple(key for key in NULLABLE if key != "num_key_value_heads"),
            tied=llama.tied,
            ignored=llama.IGNORED,
            **huggingface,
        ),
    )


FAMILIES = (
    _family(
        "1",
        SIZES_1,
        "Gemma team 2024, arXiv 2403.08295",
        model_type="gemma",
        architecture="GemmaForCausalLM",
        base=lambda: gemma("1_7b"),
        fields=llama.FIELDS,
        constants={"attention_bias": False},
        read=_read_gemma1,
        write=_write,
    ),
    _family(
        "2",
        SIZES_2,
        "Gemma team 2024, arXiv 2408.00118",
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        divisible=True,
        base=lambda: gemma("2_2b"),
        fields=_FIELDS | {"attn_logit_softcapping": "attention_logit_cap"},
        constants={"attention_bias": False},
        read=_read_gemma2,
        write=_write_gemma2,
    ),
    _family(
        "3",
        SIZES_3,
        "Gemma team 2025, arXiv 2503.19786",
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        divisible=True,
        base=_base_gemma3,
        fields=_FIELDS,
        constants={"attention_bias": False, "attn_logit_softcapping": None},  # transformers ignores the second key
        read=_read_gemma3,
        write=_write_gemma3,
    ),
)
