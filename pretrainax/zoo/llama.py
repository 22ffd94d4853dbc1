"""LLaMA 1, 2, 3, 3.1 and 3.2 (Touvron et al. 2023, arXiv 2302.13971 and 2307.09288; Grattafiori et al. 2024,
arXiv 2407.21783), and the config.json keys that derived decoders share."""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from pretrainax.config import (
    LinearScaling,
    LongContextScaling,
    LongRopeScaling,
    ModelConfig,
    RotaryPositions,
    RotaryScaling,
    UserError,
    YarnScaling,
    nearest,
)
from pretrainax.zoo.family import (
    LAST,
    ConfigJson,
    Family,
    HuggingFace,
    NameRow,
    TaskClass,
    biases,
    config_variants,
    linear,
    question_answering_class,
    token_classification_class,
)
from pretrainax.zoo.variants import pick

# variant -> (layers, width, feed-forward, heads, key heads)
SIZES = {
    "1_7b": (32, 4096, 11008, 32, 32),
    "1_13b": (40, 5120, 13824, 40, 40),
    "1_33b": (60, 6656, 17920, 52, 52),
    "1_65b": (80, 8192, 22016, 64, 64),
    "2_7b": (32, 4096, 11008, 32, 32),
    "2_13b": (40, 5120, 13824, 40, 40),
    "2_70b": (80, 8192, 28672, 64, 8),
    "3_8b": (32, 4096, 14336, 32, 8),
    "3_70b": (80, 8192, 28672, 64, 8),
    "3_1_8b": (32, 4096, 14336, 32, 8),
    "3_1_70b": (80, 8192, 28672, 64, 8),
    "3_1_405b": (126, 16384, 53248, 128, 8),
    # pruned from LLaMA 3.1 and trained with distillation
    "3_2_1b": (16, 2048, 8192, 32, 8),
    "3_2_3b": (28, 3072, 8192, 24, 8),
}

_LONG = RotaryPositions(131_072, theta=500_000.0, scaling=LongContextScaling(8.0, 1.0, 4.0, original_length=8192))
# release -> (vocabulary, epsilon of the norms, positions)
RELEASES = {
    "1": (32_000, 1e-6, RotaryPositions(2048)),
    "2": (32_000, 1e-5, RotaryPositions(4096)),
    "3": (128_256, 1e-5, RotaryPositions(8192, theta=500_000.0)),
    "3_1": (128_256, 1e-5, _LONG),
    "3_2": (128_256, 1e-5, dataclasses.replace(_LONG, scaling=dataclasses.replace(_LONG.scaling, factor=32.0))),
}


def llama(variant: str = "3_8b") -> ModelConfig:
    """Builds the model config of LLaMA; raises UserError for an unknown variant.

    Args:
      variant: release and size, such as "3_8b" for LLaMA 3 8B.
    """
    sizes, release = pick("llama", variant, SIZES), variant.rpartition("_")[0]
    vocab_size, epsilon, position = RELEASES[release]
    if variant == "1_65b":  # as in the released file; the smaller variants of LLaMA 1 have 1e-6
        epsilon = 1e-5
    return decoder(
        *sizes,
        vocab_size=vocab_size,
        norm_epsilon=epsilon,
        position=copy.deepcopy(position),
        tie_embeddings=release == "3_2",
    )


def decoder(num_layers: int, d_model: int, d_ff: int, num_heads: int, num_kv_heads: int, **fields) -> ModelConfig:
    """Builds a model config with LLaMA's architecture, also used by Mistral, Qwen and other families.

    Args:
      fields: other fields of ModelConfig, such as `vocab_size` and `position`. They override LLaMA's values.
    """
    defaults = dict(norm="rms", norm_at="pre", activation="silu", gated=True, use_bias=False)
    return ModelConfig(
        family="decoder",
        num_layers=num_layers,
        d_model=d_model,
        d_ff=d_ff,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        **defaults | fields,
    )


# norm_at -> transformers' names of (attention norm, MLP norm). In transformers, "post_attention_layernorm" normalizes
# the output of attention if norm_at is "both" or "after", but the input of the MLP if norm_at is "pre".
_NORMS = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "both": ("input_layernorm", "pre_feedforward_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
BLOCK, LAYER = "decoder/blocks", "model.layers.{layer}"  # prefixes of our parameter paths and of their tensor names


RowsOf: TypeAlias = Callable[[ModelConfig], list[NameRow]]


def feed_forward_rows(config: ModelConfig) -> list[NameRow]:
    """Builds the name-table rows of the gated feed-forward sublayers, without biases."""
    names = ("gate", "up", "down")
    return [row for name in names for row in linear(f"{BLOCK}/mlp/{name}", f"{LAYER}.mlp.{name}_proj", bias=False)]


def attention_rows(config: ModelConfig) -> list[NameRow]:
    """Builds the name-table rows of the attention sublayers, including any sinks and query and key norms."""
    ours, theirs = f"{BLOCK}/self_attention", f"{LAYER}.self_attn"
    use_bias, qkv_bias = biases(config)
    rows = [
        *linear(f"{ours}/query", f"{theirs}.q_proj", bias=qkv_bias),
        *linear(f"{ours}/key", f"{theirs}.k_proj", bias=qkv_bias),
        *linear(f"{ours}/value", f"{theirs}.v_proj", bias=qkv_bias),
        *linear(f"{ours}/out", f"{theirs}.o_proj", bias=use_bias),
    ]
    if config.attention_sinks:
        rows.append(NameRow(f"{ours}/sinks", f"{theirs}.sinks"))
    if config.qk_norm:
        rows.append(NameRow(f"{ours}/query_norm/scale", f"{theirs}.q_norm.weight"))
        rows.append(NameRow(f"{ours}/key_norm/scale", f"{theirs}.k_norm.weight"))
    return rows


def block_rows(config: ModelConfig, attention: RowsOf, feed_forward: RowsOf) -> list[NameRow]:
    """Builds the name-table rows of the layers: attention, feed-forward, and their norms.

    Args:
      attention, feed_forward: functions that return the rows of the sublayer for a config.
    """
    attention_norm, mlp_norm = _NORMS[config.norm_at]
    rows = [
        NameRow(f"{BLOCK}/self_attention_norm/scale", f"{LAYER}.{attention_norm}.weight"),
        *attention(config),
        NameRow(f"{BLOCK}/mlp_norm/scale", f"{LAYER}.{mlp_norm}.weight"),
        *feed_forward(config),
    ]
    if config.norm_at == "both":
        rows.append(NameRow(f"{BLOCK}/self_attention_post_norm/scale", f"{LAYER}.post_attention_layernorm.weight"))
        rows.append(NameRow(f"{BLOCK}/mlp_post_norm/scale", f"{LAYER}.post_feedforward_layernorm.weight"))
    return rows


def outer_rows(config: ModelConfig) -> list[NameRow]:
    """Builds the name-table rows of the embeddings, the final norm and, if untied, the output matrix."""
    rows = [
        NameRow("token_embedding/embedding", "model.embed_tokens.weight"),
        NameRow("decoder/final_norm/scale", "model.norm.weight"),
    ]
    return rows if config.tie_embeddings else rows + linear("unembedding", "lm_head", bias=False)


def huggingface_names(config: ModelConfig, feed_forward: RowsOf = feed_forward_rows) -> list[NameRow]:
    """Builds the table of tensor names in transformers' LlamaForCausalLM and derived classes.

    transformers and this package rotate the same pairs of dimensions. Meta's own files pair dimensions differently.

    Args:
      feed_forward: function that returns the rows of the feed-forward sublayer for a config.
    """
    return outer_rows(config) + block_rows(config, attention_rows, feed_forward)


def tied(config: ModelConfig) -> dict[str, str]:
    """Maps the name of the tied output matrix to the name of the embeddings; returns {} if they are untied."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_embeddings else {}


FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "d_ff",
    "hidden_act": "activation",
    "initializer_range": "init_stddev",
    "attention_dropout": "attention_dropout_rate",
    "rms_norm_eps": "norm_epsilon",
    "max_position_embeddings": "position.max_length",
    "tie_word_embeddings": "tie_embeddings",
}
IGNORED = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)  # frequencies in files from 2023

# The tokenizer defines the special token ids, so config.json contains null for them. Without these keys, some classes
# of transformers would use the token ids of their released vocabulary.
NO_TOKENS: ConfigJson = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))


def write_heads(config: ModelConfig) -> ConfigJson:
    """Returns the config.json keys for the number of key heads and the head width, with None fields resolved.

    transformers reads head_dim for Qwen 2 too, although the config class of Qwen 2 does not define this key.
    """
    return {"num_key_value_heads": config.kv_heads, "head_dim": config.dim_per_head}


# --- rotary positions ----------------------------------------------------------------------------------------------

_SCALINGS = {  # rope_type of config.json -> (our class, {key of config.json: field of our class})
    "linear": (LinearScaling, {"factor": "factor"}),
    "llama3": (
        LongContextScaling,
        {
            "factor": "factor",
            "low_freq_factor": "low_frequency_factor",
            "high_freq_factor": "high_frequency_factor",
            "original_max_position_embeddings": "original_length",
        },
    ),
    "yarn": (
        YarnScaling,
        {
            "factor": "factor",
            "beta_fast": "fast",
            "beta_slow": "slow",
            "original_max_position_embeddings": "original_length",
            "truncate": "rounded",
            "mscale": "mscale",
            "mscale_all_dim": "mscale_all_dim",
        },
    ),
    "longrope": (
        LongRopeScaling,
        {
            "short_factor": "short_factors",
            "long_factor": "long_factors",
            "factor": "factor",
            "original_max_position_embeddings": "original_length",
        },
    ),
}
_DEFAULTS = {"yarn": {"beta_fast": 32, "beta_slow": 1, "truncate": True}}  # rope_type -> defaults of optional keys


def read_rotary(json: ConfigJson, config: ModelConfig) -> None:
    """Sets theta and the scaling of rotary positions from `rope_theta` and `rope_scaling` in config.json.

    Files written by transformers 5 have `rope_parameters` instead of these keys.

    Raises:
      UserError: the scaling is not supported.
    """
    parameters = json.get("rope_scaling") or json.get("rope_parameters") or {}
    position = config.position
    position.theta = parameters.get("rope_theta", json.get("rope_theta", position.theta))
    position.scaling = read_scaling(json, parameters, position.max_length)
    latent, scaling = config.latent_attention, position.scaling
    if latent is None and isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        raise UserError(f"config.json has mscale_all_dim {scaling.mscale_all_dim}, which only DeepSeek models support")


_FRACTION_KEY = "partial_rotary_factor"


def read_partial_rotary(json: ConfigJson, config: ModelConfig) -> None:
    """Sets the fraction of head dimensions to rotate from config.json, in addition to what `read_rotary` sets.

    Files written by transformers 5 have the fraction in `rope_parameters`.
    """
    parameters = json.get("rope_parameters") or {}
    fraction = parameters.get(_FRACTION_KEY) or json.get(_FRACTION_KEY) or config.position.fraction
    config.position.fraction = None if fraction == 1.0 else fraction
    read_rotary({**json, _FRACTION_KEY: None, "rope_parameters": {**parameters, _FRACTION_KEY: None}}, config)


def read_scaling(json: ConfigJson, parameters: ConfigJson, max_length: int) -> RotaryScaling | None:
    """Builds the rotary scaling that `parameters` describes; returns None for the type "default".

    Args:
      json: the contents of config.json.
      parameters: the value of `rope_scaling` or `rope_parameters` in `json`.
      max_length: the original context length, for `parameters` that do not contain it.

    Raises:
      UserError: the scaling is not supported.
    """
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UserError(f"config.json has rotary positions for each of {sorted(parameters)}; all layers must share one")
    for fraction in (json.get(_FRACTION_KEY), parameters.get(_FRACTION_KEY)):
        if fraction not in (None, 1.0):
            raise UserError(f"config.json has {_FRACTION_KEY} {fraction!r}; only 1.0 is supported")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise UserError(f"config.json has rotary positions of rope_type {kind!r}; {nearest(str(kind), _SCALINGS)}")
    cls, names = _SCALINGS[kind]
    values = {"original_max_position_embeddings": max_length, **_DEFAULTS.get(kind, {}), **parameters}
    if kind == "yarn":
        values |= _yarn_mscales(parameters)
    if kind == "longrope":
        values |= _long_rope_values(json, parameters, max_length)
    if missing := set(names) - set(values):
        raise UserError(f"config.json has rotary positions of rope_type {kind!r} without {sorted(missing)}")
    return cls(**{ours: values[theirs] for theirs, ours in names.items()})


_FACTOR_KEYS = "short_factor", "long_factor"


def _long_rope_values(json: ConfigJson, parameters: ConfigJson, max_length: int) -> ConfigJson:
    """Returns LongRoPE's parameters: both lists of factors, the scaling factor, and the original context length.

    If `parameters` has no scaling factor, the factor is `max_length` divided by the original context length.

    Raises:
      UserError: config.json has an `attention_factor`.
    """
    if parameters.get("attention_factor") is not None:
        raise UserError(
            f"config.json has attention_factor {parameters['attention_factor']!r}; only the paper's is supported"
        )
    top_level = json.get("original_max_position_embeddings")
    original_length = parameters.get("original_max_position_embeddings", max_length) if top_level is None else top_level
    factors = {name: tuple(map(float, parameters[name])) for name in _FACTOR_KEYS if parameters.get(name)}
    factor = parameters.get("factor") or max_length / original_length
    return {**factors, "factor": factor, "original_max_position_embeddings": original_length}


def _yarn_mscales(parameters: ConfigJson) -> ConfigJson:
    """Returns YaRN's mscale and mscale_all_dim: the paper's 1 and 0, unless `parameters` contains both keys.

    Raises:
      UserError: `attention_factor` differs from the paper's value.
    """
    factor = parameters.get("attention_factor")
    if factor is not None and not math.isclose(factor, 0.1 * math.log(parameters["factor"]) + 1.0, rel_tol=1e-6):
        raise UserError(
            f"config.json has attention_factor {parameters['attention_factor']!r}; only the paper's value, or mscale "
            "and mscale_all_dim, are supported"
        )
    mscales = {name: parameters.get(name) or 0.0 for name in ("mscale", "mscale_all_dim")}
    return mscales if all(mscales.values()) else {"mscale": 1.0, "mscale_all_dim": 0.0}


def write_rotary(config: ModelConfig) -> ConfigJson:
    """Returns the config.json keys for rotary positions, in the format of transformers 4.

    Later versions of transformers read this format too.
    """
    scaling = config.position.scaling
    for kind, (cls, names) in _SCALINGS.items():
        if type(scaling) is cls:
            scaling_keys = {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
            if isinstance(scaling, YarnScaling) and not scaling.mscale_all_dim:
                scaling_keys = {name: x for name, x in scaling_keys.items() if not name.startswith("mscale")}
            json: ConfigJson = {
                "rope_theta": config.position.theta,
                "rope_scaling": {"rope_type": kind, **scaling_keys},
            }
            if isinstance(scaling, LongRopeScaling):  # Phi-3 reads the length at the top level
                json["rope_scaling"] |= {name: list(scaling_keys[name]) for name in _FACTOR_KEYS}
                json["original_max_position_embeddings"] = scaling.original_length
            return json
    return {"rope_theta": config.position.theta, "rope_scaling": None}


def write_partial_rotary(config: ModelConfig) -> ConfigJson:
    """Returns the config.json keys for rotary positions, including the rotated fraction of the head dimensions."""
    fraction = config.position.fraction
    return write_rotary(config) | {_FRACTION_KEY: 1.0 if fraction is None else fraction}


# --- the family ----------------------------------------------------------------------------------------------------


def _base() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = llama("1_7b")
    config.num_kv_heads = None
    return config


FAMILIES = (
    Family(
        name="LLaMA",
        prefix="llama",
        preset=llama,
        sizes=SIZES,
        paper="Touvron et al. 2023, arXiv 2302.13971, 2307.09288; Grattafiori et al. 2024, arXiv 2407.21783",
        objective="causal language modelling",
        configs=config_variants("llama", (size for size in SIZES if not size.startswith("3_2"))),
        huggingface=HuggingFace(
            model_type="llama",
            architecture="LlamaForCausalLM",
            base=_base,
            fields=FIELDS,
            table=huggingface_names,
            sequence_classification_class=TaskClass("LlamaForSequenceClassification", LAST),
            token_classification_class=token_classification_class("LlamaForCausalLM", "score"),
            question_answering_class=question_answering_class("LlamaForCausalLM", base="transformer"),
            constants={"attention_bias": False, "mlp_bias": False},
            read=read_rotary,
            write=lambda config: write_heads(config) | write_rotary(config),
            tied=tied,
            ignored=IGNORED,
        ),
    ),
)
