"""OLMo 2 (Walsh et al. 2025, arXiv 2501.00656), and OLMoE (Muennighoff et al. 2024, arXiv 2409.02060)."""

from pretrainax.config import MixtureOfExperts, ModelConfig, RotaryPositions
from pretrainax.zoo import experts, llama
from pretrainax.zoo.family import ConfigJson, Family, HuggingFace, trained_by
from pretrainax.zoo.variants import pick

# variant -> (layers, width, feed-forward, heads, key heads)
SIZES_2 = {
    "2_1b": (16, 2048, 8192, 16, 16),
    "2_7b": (32, 4096, 11008, 32, 32),
    "2_13b": (40, 5120, 13824, 40, 40),
    "2_32b": (64, 5120, 27648, 40, 8),
}
SIZES_MOE = {"1b_7b": (16, 2048, 1024, 16, 16)}  # the feed-forward is that of each of 64 experts


def olmo(variant: str = "2_7b") -> ModelConfig:
    """Returns OLMo 2, `release_size`; UserError for an unknown variant."""
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


def olmoe(variant: str = "1b_7b") -> ModelConfig:
    """Returns OLMoE, version 0924; UserError for an unknown variant."""
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


def _base() -> ModelConfig:
    """Returns what transformers takes where config.json is silent."""
    config = olmo("2_7b")
    config.vocab_size, config.norm_epsilon, config.num_kv_heads = 50_304, 1e-5, None
    config.position = RotaryPositions(2048)
    return config


def _base_moe() -> ModelConfig:
    """Returns the same of OLMoE."""
    config = olmoe()
    config.d_ff, config.num_kv_heads = 2048, None
    assert config.experts is not None
    config.experts.z_weight = 0.0  # of which config.json knows nothing
    return config


def _write(config: ModelConfig) -> ConfigJson:
    return {"num_key_value_heads": config.kv_heads} | llama.write_rotary(config)


def _read_moe(json: ConfigJson, config: ModelConfig) -> None:
    llama.read_rotary(json, config)
    experts.read(json, config)


_FIELDS = {key: path for key, path in llama.FIELDS.items() if key != "head_dim"}  # which follows from the width
FAMILIES = (
    Family(
        name="OLMo 2",
        prefix="olmo",
        preset=olmo,
        sizes=SIZES_2,
        paper="Walsh et al. 2025, arXiv 2501.00656",
        objective="causal language modelling",
        configs=trained_by("olmo", SIZES_2),
        huggingface=HuggingFace(
            model_type="olmo2",
            architecture="Olmo2ForCausalLM",
            base=_base,
            fields=_FIELDS,
            table=llama.huggingface_names,
            constants={"attention_bias": False},
            read=llama.read_rotary,
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
        configs=trained_by("olmoe", SIZES_MOE),
        huggingface=HuggingFace(
            model_type="olmoe",
            architecture="OlmoeForCausalLM",
            base=_base_moe,
            fields=_FIELDS
            | {
                "num_experts": "experts.num_experts",
                "num_experts_per_tok": "experts.top_k",
                "norm_topk_prob": "experts.normalized",
            },
            table=experts.names("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
            constants={"attention_bias": False, "clip_qkv": None},
            read=_read_moe,
            write=lambda config: _write(config) | experts.write(config),
            tied=llama.tied,
        ),
    ),
)
