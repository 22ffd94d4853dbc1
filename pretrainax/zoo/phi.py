"""Phi-1, 1.5 and 2 (Gunasekar et al. 2023, arXiv 2306.11644; Li et al. 2023, arXiv 2309.05463; Javaheripi and Bubeck
2023): parallel attention and MLP, biases in all layers, and partial rotary positions. Phi-3 and 4 (Abdin et al. 2024,
arXiv 2404.14219 and 2412.08905): LLaMA's architecture, with fused projections in the released files.

LongRoPE extends the context of Phi-3.5-mini and Phi-4-mini from 4,096 to 131,072 tokens.
"""

import itertools
from typing import Optional

import numpy as np

from pretrainax.config import LongRopeScaling, ModelConfig, RotaryPositions, UserError
from pretrainax.zoo import llama, rotary
from pretrainax.zoo.family import (
    LAST,
    ConfigJson,
    Family,
    FusedPart,
    HuggingFace,
    NameRow,
    TaskClass,
    config_variants,
    layer_norm,
    linear,
    token_classification_class,
)
from pretrainax.zoo.variants import pick

# variant -> (layers, width, heads, rotated fraction of the dimensions of a head). All variants rotate 32 dimensions.
SIZES = {"1": (24, 2048, 32, 0.5), "1_5": (24, 2048, 32, 0.5), "2": (32, 2560, 32, 0.4)}
# variant -> (layers, width, feed-forward, heads, key heads, vocabulary, positions, rotary theta, window)
SIZES_3 = {
    "3_3_8b": (32, 3072, 8192, 32, 32, 32_064, 4096, 10_000.0, 2047),
    "3_14b": (40, 5120, 17920, 40, 10, 32_064, 4096, 10_000.0, 2047),
    "4_14b": (40, 5120, 17920, 40, 10, 100_352, 16_384, 250_000.0, None),
}
# variant -> the columns of SIZES_3 without the window. It is None, because the released window exceeds all sequences.
SIZES_LONG = {
    "3_5_3_8b": (32, 3072, 8192, 32, 32, 32_064, 131_072, 10_000.0),
    "4_3_8b": (32, 3072, 8192, 24, 8, 200_064, 131_072, 10_000.0),
}
# variant -> (LongRoPE factors for contexts of up to 4,096 tokens, factors for longer contexts), one factor per pair of
# rotated dimensions. The released file of Phi-3.5 has these factors with all digits of their float32 values.
_FACTORS = {
    "3_5_3_8b": (
        (
            1.0,
            1.02,
            1.03,
            1.03,
            1.05,
            1.05,
            1.05,
            1.05,
            1.05,
            1.0699999,
            1.0999999,
            1.1099999,
            1.1599998,
            1.1599998,
            1.1699998,
            1.2899998,
            1.3399998,
            1.6799998,
            1.7899998,
            1.8199998,
            1.8499998,
            1.8799998,
            1.9099997,
            1.9399997,
            1.9899997,
            2.0199997,
            2.0199997,
            2.0199997,
            2.0199997,
            2.0199997,
            2.0199997,
            2.0299997,
            2.0299997,
            2.0299997,
            2.0299997,
            2.0299997,
            2.0299997,
            2.0299997,
            2.0299997,
            2.0299997,
            2.0799997,
            2.0899997,
            2.1899996,
            2.2199996,
            2.5899994,
            2.7299995,
            2.7499995,
            2.8399994,
        ),
        (
            1.08,
            1.11,
            1.14,
            1.34,
            1.5899999,
            1.6,
            1.62,
            2.6200001,
            3.23,
            3.23,
            4.79,
            7.4,
            7.7000003,
            9.09,
            12.2,
            17.67,
            24.460001,
            28.570002,
            30.420002,
            30.840002,
            32.590004,
            32.930004,
            42.320004,
            44.960003,
            50.340004,
            50.450005,
            57.550003,
            57.930004,
            58.210003,
            60.140003,
            62.610004,
            62.620003,
            62.710003,
            63.140003,
            63.140003,
            63.770004,
            63.930004,
            63.960003,
            63.97,
            64.03,
            64.07,
            64.08,
            64.12,
            64.41,
            64.48,
            64.51,
            64.53,
            64.84,
        ),
    ),
    "4_3_8b": (
        (1.0,) * 48,
        (
            1.0,
            1.118320672,
            1.250641126,
            1.398617824,
            1.564103225,
            1.74916897,
            1.956131817,
            2.187582649,
            2.446418898,
            2.735880826,
            3.059592084,
            3.421605075,
            3.826451687,
            4.279200023,
            4.785517845,
            5.351743533,
            5.984965424,
            6.693110555,
            7.485043894,
            8.370679318,
            9.36110372,
            10.4687158,
            11.70738129,
            13.09260651,
            14.64173252,
            16.37415215,
            18.31155283,
            20.47818807,
            22.90118105,
            25.61086418,
            28.64115884,
            32.03,
            32.1,
            32.13,
            32.23,
            32.6,
            32.61,
            32.64,
            32.66,
            32.7,
            32.71,
            32.93,
            32.97,
            33.28,
            33.49,
            33.5,
            44.16,
            47.77,
        ),
    ),
}
DROPOUT = {"1": 0.1, "1_5": 0.0, "2": 0.1}


def phi(variant: str = "1_5") -> ModelConfig:
    """Builds the model config of Phi; raises UserError for an unknown variant."""
    sizes = pick("phi", variant, SIZES | SIZES_3 | SIZES_LONG)
    if variant in SIZES:
        return _phi1(variant, *sizes)
    if variant in SIZES_3:
        return _phi3(*sizes)
    config = _phi3(*sizes, None)
    short, long = _FACTORS[variant]
    if variant == "3_5_3_8b":
        short, long = (tuple(np.array(factors, np.float32).tolist()) for factors in (short, long))
    config.position.scaling = LongRopeScaling(short, long, factor=32.0, original_length=4096)
    if variant == "4_3_8b":
        config.position.fraction, config.tie_embeddings = 0.75, True
    return config


def _phi1(variant: str, num_layers: int, d_model: int, num_heads: int, fraction: float) -> ModelConfig:
    """Builds the model config of Phi 1, 1.5 or 2; `fraction` is the fraction of head dimensions to rotate."""
    return ModelConfig(
        family="decoder",
        vocab_size=51_200,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=4 * d_model,
        num_heads=num_heads,
        position=RotaryPositions(2048, fraction=fraction),
        norm="layer",
        norm_at="pre",
        parallel=True,
        norm_epsilon=1e-5,
        activation="gelu_tanh",
        use_bias=True,
        output_bias=True,
        tie_embeddings=False,
        dropout_rate=DROPOUT[variant],
        attention_dropout_rate=0.1 if variant == "1" else 0.0,
    )


def _phi3(*sizes) -> ModelConfig:
    """Builds the model config of Phi 3 or 4 from the columns of a row of SIZES_3."""
    *sizes, vocab_size, positions, theta, window = sizes
    return llama.decoder(
        *sizes,
        vocab_size=vocab_size,
        position=RotaryPositions(positions, theta=theta),
        layer_pattern=_layer_pattern(window),
        window=window,
        norm_epsilon=1e-5,
        tie_embeddings=False,
    )


def _layer_pattern(window: Optional[int]) -> tuple[str, ...]:
    return ("global",) if window is None else ("local",)


# --- Hugging Face --------------------------------------------------------------------------------------------------


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' PhiForCausalLM."""
    block, layer = llama.BLOCK, llama.LAYER
    ours, theirs = f"{block}/self_attention", f"{layer}.self_attn"
    rows = [
        NameRow("token_embedding/embedding", "model.embed_tokens.weight"),
        *layer_norm(f"{ours}_norm", f"{layer}.input_layernorm"),
        *linear(f"{ours}/query", f"{theirs}.q_proj", bias=True),
        *linear(f"{ours}/key", f"{theirs}.k_proj", bias=True),
        *linear(f"{ours}/value", f"{theirs}.v_proj", bias=True),
        *linear(f"{ours}/out", f"{theirs}.dense", bias=True),
        *linear(f"{block}/mlp/up", f"{layer}.mlp.fc1", bias=True),
        *linear(f"{block}/mlp/down", f"{layer}.mlp.fc2", bias=True),
        *layer_norm("decoder/final_norm", "model.final_layernorm"),
        NameRow("unembedding/bias", "lm_head.bias"),
    ]
    return rows if config.tie_embeddings else [*rows, *linear("unembedding", "lm_head", bias=False)]


def fused_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' Phi3ForCausalLM.

    The tensor names are LLaMA's, except for two fused matrices: one for queries, keys and values, and one for the gate
    and up projections.
    """
    return llama.outer_rows(config) + llama.block_rows(config, _attention_rows, _feed_forward_rows)


def _attention_rows(config: ModelConfig) -> list[NameRow]:
    """Builds the name-table rows of attention, splitting the fused query, key and value projection by heads."""
    heads, key_heads = config.num_heads, config.kv_heads
    ours, theirs, num_fused_heads = f"{llama.BLOCK}/self_attention", f"{llama.LAYER}.self_attn", heads + 2 * key_heads
    fused_parts = {
        "query": FusedPart(0, heads, num_fused_heads),
        "key": FusedPart(heads, key_heads, num_fused_heads),
        "value": FusedPart(heads + key_heads, key_heads, num_fused_heads),
    }
    rows = [linear(f"{ours}/{name}", f"{theirs}.qkv_proj", bias=False, part=part) for name, part in fused_parts.items()]
    return [*itertools.chain(*rows), *linear(f"{ours}/out", f"{theirs}.o_proj", bias=False)]


def _feed_forward_rows(config: ModelConfig) -> list[NameRow]:
    ours, theirs = f"{llama.BLOCK}/mlp", f"{llama.LAYER}.mlp"
    return [
        *linear(f"{ours}/gate", f"{theirs}.gate_up_proj", bias=False, part=FusedPart(0, 1, 2)),
        *linear(f"{ours}/up", f"{theirs}.gate_up_proj", bias=False, part=FusedPart(1, 1, 2)),
        *linear(f"{ours}/down", f"{theirs}.down_proj", bias=False),
    ]


def _base_phi3() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = phi("3_3_8b")
    config.layer_pattern, config.window, config.num_kv_heads = ("global",), None, None
    return config


def _read_phi3(json: ConfigJson, config: ModelConfig) -> None:
    scaling = json.get("rope_scaling") or json.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "longrope"):
        raise UserError(f"config.json has rotary positions of rope_type {kind!r}; 'phi3' supports only 'longrope'")
    rotary.read({"original_max_position_embeddings": 4096} | json, config, partial=True)
    if kind != "default" and config.dim_per_head * config.num_heads != config.d_model:
        raise UserError(f"config.json has head_dim {config.head_dim}; with 'longrope' it must be hidden_size / heads")
    if config.window is not None and config.window >= config.position.max_length:
        config.window = None  # a window longer than any sequence has no effect
    config.layer_pattern = _layer_pattern(config.window)


def _write(config: ModelConfig) -> ConfigJson:
    json = llama.write_heads(config) | rotary.write_partial(config) | llama.NO_TOKENS
    return json | {"embd_pdrop": config.dropout_rate}


_RENAMED_KEYS = {"rms_norm_eps": "layer_norm_eps"}

FAMILIES = (
    Family(
        name="Phi",
        prefix="phi",
        preset=phi,
        sizes=SIZES,
        paper="Gunasekar et al. 2023, arXiv 2306.11644; Li et al. 2023, arXiv 2309.05463",
        objective="causal language modelling",
        configs=config_variants("phi", SIZES),
        huggingface=HuggingFace(
            model_type="phi",
            architecture="PhiForCausalLM",
            base=phi,
            fields={_RENAMED_KEYS.get(key, key): path for key, path in llama.FIELDS.items()}
            | {"resid_pdrop": "dropout_rate"},
            table=huggingface_names,
            sequence_classification_class=TaskClass("PhiForSequenceClassification", LAST),
            token_classification_class=token_classification_class("PhiForCausalLM", "score"),
            constants={"qk_layernorm": False},
            read=lambda json, config: rotary.read(json, config, partial=True),
            write=_write,
            tied=llama.tied,
            ignored=llama.IGNORED,
        ),
    ),
    Family(
        name="Phi-3, 4",
        prefix="phi",
        preset=phi,
        sizes=SIZES_3 | SIZES_LONG,
        paper="Abdin et al. 2024, arXiv 2404.14219, 2412.08905",
        objective="causal language modelling",
        configs=config_variants("phi", SIZES_3),
        huggingface=HuggingFace(
            model_type="phi3",
            architecture="Phi3ForCausalLM",
            base=_base_phi3,
            fields=llama.FIELDS | {"resid_pdrop": "dropout_rate", "sliding_window": "window"},
            table=fused_names,
            sequence_classification_class=TaskClass("Phi3ForSequenceClassification", LAST),
            token_classification_class=token_classification_class("Phi3ForCausalLM", "score"),
            read=_read_phi3,
            write=_write,
            tied=llama.tied,
            ignored=llama.IGNORED,
        ),
    ),
)
