"""Qwen 2, 2.5 and 3 (Yang et al. 2024, arXiv 2407.10671 and 2412.15115; 2025, arXiv 2505.09388)."""

from pretrainax.config import MixtureOfExperts, ModelConfig, RotaryPositions, UserError
from pretrainax.zoo import experts, llama, patterns, rotary
from pretrainax.zoo.family import (
    LAST,
    ConfigJson,
    Family,
    HuggingFace,
    TaskClass,
    config_variants,
    question_answering_class,
    token_classification_class,
)
from pretrainax.zoo.variants import pick

# variant -> (layers, width, feed-forward, heads, key heads, vocabulary, tied embeddings, epsilon of the norm)
SIZES_2 = {
    "2_0_5b": (24, 896, 4864, 14, 2, 151_936, True, 1e-6),
    "2_1_5b": (28, 1536, 8960, 12, 2, 151_936, True, 1e-6),
    "2_7b": (28, 3584, 18944, 28, 4, 152_064, False, 1e-6),
    "2_72b": (80, 8192, 29568, 64, 8, 152_064, False, 1e-5),
    "2_5_0_5b": (24, 896, 4864, 14, 2, 151_936, True, 1e-6),
    "2_5_1_5b": (28, 1536, 8960, 12, 2, 151_936, True, 1e-6),
    "2_5_3b": (36, 2048, 11008, 16, 2, 151_936, True, 1e-6),
    "2_5_7b": (28, 3584, 18944, 28, 4, 152_064, False, 1e-6),
    "2_5_14b": (48, 5120, 13824, 40, 8, 152_064, False, 1e-5),
    "2_5_32b": (64, 5120, 27648, 40, 8, 152_064, False, 1e-5),
    "2_5_72b": (80, 8192, 29568, 64, 8, 152_064, False, 1e-5),
}
SIZES_3 = {  # heads have width 128 in all variants
    "3_0_6b": (28, 1024, 3072, 16, 8, 151_936, True, 1e-6),
    "3_1_7b": (28, 2048, 6144, 16, 8, 151_936, True, 1e-6),
    "3_4b": (36, 2560, 9728, 32, 8, 151_936, True, 1e-6),
    "3_8b": (36, 4096, 12288, 32, 8, 151_936, False, 1e-6),
    "3_14b": (40, 5120, 17408, 40, 8, 151_936, False, 1e-6),
    "3_32b": (64, 5120, 25600, 64, 8, 151_936, False, 1e-6),
}
# The feed-forward width in SIZES_3_MOE is unused, because all layers have experts.
SIZES_3_MOE = {
    "3_30b_a3b": (48, 2048, 6144, 32, 4, 151_936, False, 1e-6),
    "3_235b_a22b": (94, 4096, 12288, 64, 4, 151_936, False, 1e-6),
}
EXPERT_WIDTHS = {"3_30b_a3b": 768, "3_235b_a22b": 1536}


def qwen(variant: str = "2_5_0_5b") -> ModelConfig:
    """Builds the model config of Qwen; raises UserError for an unknown variant.

    Args:
      variant: release and size: "2_5_0_5b" is Qwen 2.5 0.5B.
    """
    *sizes, vocab_size, tie_embeddings, epsilon = pick("qwen", variant, SIZES_2 | SIZES_3 | SIZES_3_MOE)
    is_qwen3 = variant not in SIZES_2
    return llama.decoder(
        *sizes,
        vocab_size=vocab_size,
        # Context length of pretraining. Some released files have larger values, for inference with YaRN.
        position=RotaryPositions(32_768, theta=1_000_000.0),
        norm_epsilon=epsilon,
        tie_embeddings=tie_embeddings,
        head_dim=128 if is_qwen3 else None,
        qk_norm=is_qwen3,
        qkv_bias=not is_qwen3,
        experts=_mixture(EXPERT_WIDTHS[variant]) if variant in SIZES_3_MOE else None,
    )


def _mixture(width: int) -> MixtureOfExperts:
    return MixtureOfExperts(num_experts=128, top_k=8, d_ff=width, balance_weight=8 * 0.001)


def _base(variant: str) -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = qwen(variant)
    config.num_layers, config.d_model, config.d_ff, config.num_heads, config.num_kv_heads = 32, 4096, 22016, 32, 32
    config.vocab_size, config.tie_embeddings, config.position.theta = 151_936, False, 10_000.0
    config.window = 4096
    return config


def _read(json: ConfigJson, config: ModelConfig) -> None:
    rotary.read(json, config)
    patterns.drop_unused_window(json, config)
    # index of the first local layer
    first_local = config.num_layers if config.window is None else json.get("max_window_layers", 28)
    kinds = ["local" if i >= first_local else "global" for i in range(config.num_layers)]
    patterns.read(json, config, otherwise=kinds)


def _write(config: ModelConfig) -> ConfigJson:
    json = llama.write_heads(config) | rotary.write(config) | patterns.write(config)
    return json | {"use_sliding_window": config.window is not None}


def _base_qwen3_moe() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = qwen("3_30b_a3b")
    config.num_layers, config.head_dim, config.position.theta, config.window = 24, None, 10_000.0, 4096
    assert config.experts is not None
    config.experts.normalized = False
    return config


def _read_qwen3_moe(json: ConfigJson, config: ModelConfig) -> None:
    if json.get("decoder_sparse_step", 1) != 1 or json.get("mlp_only_layers"):
        raise UserError(
            f"config.json has decoder_sparse_step {json.get('decoder_sparse_step', 1)} and mlp_only_layers "
            f"{json.get('mlp_only_layers')}; only models with experts in all layers are supported"
        )
    rotary.read(json, config)
    patterns.drop_unused_window(json, config)
    patterns.read_uniform(json, config)
    experts.read(json, config)


_FIELDS = llama.FIELDS | {"sliding_window": "window"}
FAMILIES = (
    Family(
        name="Qwen 2, 2.5",
        prefix="qwen",
        preset=qwen,
        sizes=SIZES_2,
        paper="Yang et al. 2024, arXiv 2407.10671, 2412.15115",
        objective="causal language modelling",
        configs=config_variants("qwen", SIZES_2),
        huggingface=HuggingFace(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            base=lambda: _base("2_7b"),
            fields=_FIELDS,
            table=llama.huggingface_names,
            sequence_classification_class=TaskClass("Qwen2ForSequenceClassification", LAST),
            token_classification_class=token_classification_class("Qwen2ForCausalLM", "score"),
            question_answering_class=question_answering_class("Qwen2ForCausalLM", base="transformer"),
            read=_read,
            write=_write,
            tied=llama.tied,
            ignored=llama.IGNORED,
        ),
    ),
    Family(
        name="Qwen 3",
        prefix="qwen",
        preset=qwen,
        sizes=SIZES_3,
        paper="Yang et al. 2025, arXiv 2505.09388",
        objective="causal language modelling",
        configs=config_variants("qwen", SIZES_3),
        huggingface=HuggingFace(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            base=lambda: _base("3_8b"),
            fields=_FIELDS,
            table=llama.huggingface_names,
            sequence_classification_class=TaskClass("Qwen3ForSequenceClassification", LAST),
            token_classification_class=token_classification_class("Qwen3ForCausalLM", "score"),
            question_answering_class=question_answering_class("Qwen3ForCausalLM", base="transformer"),
            constants={"attention_bias": False},
            read=_read,
            write=_write,
            tied=llama.tied,
            ignored=llama.IGNORED,
        ),
    ),
    Family(
        name="Qwen 3 MoE",
        prefix="qwen",
        preset=qwen,
        sizes=SIZES_3_MOE,
        paper="Yang et al. 2025, arXiv 2505.09388",
        objective="causal language modelling",
        configs=config_variants("qwen", SIZES_3_MOE),
        huggingface=HuggingFace(
            model_type="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            base=_base_qwen3_moe,
            fields=_FIELDS
            | {
                "num_experts": "experts.num_experts",
                "num_experts_per_tok": "experts.top_k",
                "moe_intermediate_size": "experts.d_ff",
                "norm_topk_prob": "experts.normalized",
            },
            table=experts.names("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
            sequence_classification_class=TaskClass("Qwen3MoeForSequenceClassification", LAST),
            token_classification_class=token_classification_class("Qwen3MoeForCausalLM", "score"),
            question_answering_class=question_answering_class("Qwen3MoeForCausalLM", base="transformer"),
            constants={"attention_bias": False, "decoder_sparse_step": 1},
            read=_read_qwen3_moe,
            write=lambda config: _write(config) | experts.write(config) | experts.width(config),
            aliases=experts.ALIASES,
            nullable=("sliding_window",),
            tied=llama.tied,
            ignored=llama.IGNORED,
        ),
    ),
)
