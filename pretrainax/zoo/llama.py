"""LLaMA 1, 2, 3, 3.1 and 3.2 (Touvron et al. 2023, arXiv 2302.13971 and 2307.09288; Grattafiori et al. 2024,
arXiv 2407.21783), and the config.json keys that derived decoders share."""

import copy
import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from pretrainax.config import LongContextScaling, ModelConfig, RotaryPositions
from pretrainax.zoo import rotary
from pretrainax.zoo.family import (
    LAST,
    NULLABLE,
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
      variant: release and size: "3_8b" is LLaMA 3 8B.
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
      fields: other fields of ModelConfig, for example `vocab_size` and `position`. They override LLaMA's values.
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

    transformers and this package rotate the same pairs of dimensions. Meta's files pair dimensions differently.

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
            nullable=(*NULLABLE, "head_dim"),
            divisible=True,
            read=rotary.read,
            write=lambda config: write_heads(config) | rotary.write(config),
            tied=tied,
            ignored=IGNORED,
        ),
    ),
)
