"""OLMo 2 (Walsh et al. 2025, arXiv 2501.00656), OLMoE (Muennighoff et al. 2024, arXiv 2409.02060) and OLMo 3 (arXiv
2512.13961)."""

import dataclasses

from pretrainax.config import MixtureOfExperts, ModelConfig, RotaryPositions, UserError, YarnScaling
from pretrainax.zoo import experts, llama, patterns, rotary
from pretrainax.zoo.family import ConfigJson, Family, HuggingFace, config_variants
from pretrainax.zoo.variants import pick

# variant -> (layers, width, feed-forward, heads, key heads)
SIZES_2 = {
    "2_1b": (16, 2048, 8192, 16, 16),
    "2_7b": (32, 4096, 11008, 32, 32),
    "2_13b": (40, 5120, 13824, 40, 40),
    "2_32b": (64, 5120, 27648, 40, 8),
}
SIZES_3 = {"3_7b": SIZES_2["2_7b"], "3_32b": SIZES_2["2_32b"]}
SIZES_MOE = {"1b_7b": (16, 2048, 1024, 16, 16)}  # the feed-forward width is the width of an expert


def olmo(variant: str = "2_7b") -> ModelConfig:
    """Builds the model config of OLMo 2; raises UserError for an unknown variant.

    Args:
      variant: release and size: "2_7b" is OLMo 2 7B.
    """
    return llama.decoder(
        *pick("olmo", variant, SIZES_2),
        vocab_size=100_352,
        position=RotaryPositions(4096, theta=500_000.0),
        norm_at="after",
        norm_epsilon=1e-6,
        qk_norm=True,
        qk_norm_heads="all",
        tie_embeddings=False,
    )


def olmo3(variant: str = "3_7b") -> ModelConfig:
    """Builds the model config of OLMo 3 as released, with 65,536 tokens of context.

    Three out of every four layers have local attention. YaRN scales the rotary positions of the global layers only.

    Raises:
      UserError: the variant is unknown.
    """
    pick("olmo", variant, SIZES_3)
    return dataclasses.replace(
        olmo(variant.replace("3_", "2_", 1)),
        vocab_size=100_278,
        position=RotaryPositions(
            65_536, theta=500_000.0, scaling=YarnScaling(8.0, original_length=8192), local_theta=500_000.0
        ),
        layer_pattern=("local", "local", "local", "global"),
        window=4096,
    )


def olmoe(variant: str = "1b_7b") -> ModelConfig:
    """Builds the model config of OLMoE, version 0924; raises UserError for an unknown variant."""
    return llama.decoder(
        *pick("olmoe", variant, SIZES_MOE),
        vocab_size=50_304,
        position=RotaryPositions(4096),
        norm_epsilon=1e-5,
        qk_norm=True,
        qk_norm_heads="all",
        tie_embeddings=False,
        experts=MixtureOfExperts(num_experts=64, top_k=8, normalized=False, balance_weight=0.01, z_weight=0.001),
    )


def _base_olmo2() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = olmo("2_7b")
    config.vocab_size, config.norm_epsilon, config.num_kv_heads = 50_304, 1e-5, None
    config.position = RotaryPositions(2048)
    return config


def _base_olmo3() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = olmo3("3_7b")
    config.vocab_size, config.norm_epsilon, config.num_kv_heads = 50_304, 1e-5, None
    config.position = RotaryPositions(2048)
    return config


def _base_olmoe() -> ModelConfig:
    """Builds the OLMoE config with transformers' defaults, which apply to keys missing from config.json."""
    config = olmoe()
    config.d_ff, config.num_kv_heads = 2048, None
    assert config.experts is not None
    config.experts.z_weight = 0.0  # config.json has no key for this weight
    return config


def _write(config: ModelConfig) -> ConfigJson:
    return llama.write_heads(config) | rotary.write(config)


def _read_olmo3(json: ConfigJson, config: ModelConfig) -> None:
    """Sets the layer pattern, the window, and the rotary positions of local and global layers from config.json.

    In transformers, only the global layers scale their rotary positions.
    """
    rotary.read_both(json, config, json.get("rope_theta", 500_000.0), 500_000.0)
    default_kinds = ["global" if (i + 1) % 4 == 0 else "local" for i in range(config.num_layers)]
    patterns.read(json, config, default_kinds)
    position = config.position
    if config.window is None or (position.scaling, position.local_theta) == (None, position.theta):  # no layer differs
        position.local_theta = None


def _write_olmo3(config: ModelConfig) -> ConfigJson:
    """Returns the config.json keys, with rotary positions in the formats of both transformers 4 and 5.

    If only the transformers 4 format were written, transformers 5 would read a wrong theta for local layers.
    """
    json, position = _write(config) | patterns.write(config), config.position
    local_theta = position.theta if position.local_theta is None else position.local_theta
    full = {"rope_type": "default", **(json["rope_scaling"] or {}), "rope_theta": position.theta}
    sliding = {"rope_type": "default", "rope_theta": local_theta}
    return json | {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _read_olmoe(json: ConfigJson, config: ModelConfig) -> None:
    if json.get("head_dim") not in (None, width := config.d_model // config.num_heads):
        raise UserError(f"config.json has head_dim {json['head_dim']}; it must be {width}, as the class's norms need")
    rotary.read(json, config)
    experts.read(json, config, coefficient=0.01)


FAMILIES = (
    Family(
        name="OLMo 2",
        prefix="olmo",
        preset=olmo,
        sizes=SIZES_2,
        paper="Walsh et al. 2025, arXiv 2501.00656",
        objective="causal language modelling",
        configs=config_variants("olmo", SIZES_2),
        huggingface=HuggingFace(
            model_type="olmo2",
            architecture="Olmo2ForCausalLM",
            base=_base_olmo2,
            fields=llama.FIELDS,
            table=llama.huggingface_names,
            constants={"attention_bias": False},
            read=rotary.read,
            write=_write,
            tied=llama.tied,
        ),
    ),
    Family(
        name="OLMoE",
        prefix="olmoe_",
        preset=olmoe,
        sizes=SIZES_MOE,
        paper="Muennighoff et al. 2024, arXiv 2409.02060",
        objective="causal language modelling",
        configs=config_variants("olmoe", SIZES_MOE),
        huggingface=HuggingFace(
            model_type="olmoe",
            architecture="OlmoeForCausalLM",
            base=_base_olmoe,
            fields={key: path for key, path in llama.FIELDS.items() if key != "head_dim"}
            | {
                "num_experts": "experts.num_experts",
                "num_experts_per_tok": "experts.top_k",
                "norm_topk_prob": "experts.normalized",
            },
            table=experts.names("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
            constants={"attention_bias": False, "clip_qkv": None},
            aliases=experts.ALIASES,
            read=_read_olmoe,
            write=lambda config: _write(config) | experts.write(config),
            tied=llama.tied,
        ),
    ),
    Family(
        name="OLMo 3",
        prefix="olmo",
        preset=olmo3,
        sizes=SIZES_3,
        paper="Olmo team 2025, arXiv 2512.13961",
        objective="causal language modelling",
        configs=config_variants("olmo3", SIZES_3),
        huggingface=HuggingFace(
            model_type="olmo3",
            architecture="Olmo3ForCausalLM",
            base=_base_olmo3,
            fields=llama.FIELDS | {"sliding_window": "window"},
            table=llama.huggingface_names,
            constants={"attention_bias": False},
            read=_read_olmo3,
            write=_write_olmo3,
            tied=llama.tied,
        ),
    ),
)
