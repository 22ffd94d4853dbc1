"""LLaMA 1, 2, 3 and 3.1 (Touvron et al. 2023, arXiv 2302.13971 and 2307.09288; Grattafiori et al. 2024,
arXiv 2407.21783)."""

import copy

from pretrainax.config import LongContextScaling, ModelConfig, RotaryPositions
from pretrainax.zoo.family import Row, linear
from pretrainax.zoo.variants import pick

# variant -> (layers, width, feed-forward, heads, key heads)
SIZES = {
    # 2302.13971, table 2; feed-forward: 2/3 of 4 x the width, rounded up to a multiple of 256 (section 2.2, the code)
    "1_7b": (32, 4096, 11008, 32, 32),
    "1_13b": (40, 5120, 13824, 40, 40),
    "1_33b": (60, 6656, 17920, 52, 52),
    "1_65b": (80, 8192, 22016, 64, 64),
    # 2307.09288, table 1 and the released params.json
    "2_7b": (32, 4096, 11008, 32, 32),
    "2_13b": (40, 5120, 13824, 40, 40),
    "2_70b": (80, 8192, 28672, 64, 8),
    # 2407.21783, table 3
    "3_8b": (32, 4096, 14336, 32, 8),
    "3_70b": (80, 8192, 28672, 64, 8),
    "3_1_8b": (32, 4096, 14336, 32, 8),
    "3_1_70b": (80, 8192, 28672, 64, 8),
    "3_1_405b": (126, 16384, 53248, 128, 8),
}

# release -> (vocabulary, epsilon of the norm, positions)
RELEASES = {
    "1": (32_000, 1e-6, RotaryPositions(max_length=2048)),
    "2": (32_000, 1e-5, RotaryPositions(max_length=4096)),
    "3": (128_256, 1e-5, RotaryPositions(max_length=8192, theta=500_000.0)),
    "3_1": (
        128_256,
        1e-5,
        RotaryPositions(
            max_length=131_072,
            theta=500_000.0,
            scaling=LongContextScaling(
                factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
            ),
        ),
    ),
}


def llama(variant: str = "3_8b") -> ModelConfig:
    """LLaMA, `release_size`; UserError for an unknown variant."""
    num_layers, d_model, d_ff, num_heads, num_kv_heads = pick("llama", variant, SIZES)
    vocab_size, epsilon, position = RELEASES[variant.rpartition("_")[0]]
    return ModelConfig(
        family="decoder",
        vocab_size=vocab_size,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=d_ff,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        position=copy.deepcopy(position),
        norm="rms",
        norm_at="pre",
        norm_epsilon=epsilon,
        activation="silu",
        gated=True,
        use_bias=False,
        tie_embeddings=False,
    )


def huggingface_names(config: ModelConfig) -> list[Row]:
    """Of transformers' LlamaForCausalLM, whose rotary planes are ours (Meta's own files pair them differently)."""
    del config  # the same for all
    block, layer = "decoder/blocks", "model.layers.{layer}"
    return [
        Row("token_embedding/embedding", "model.embed_tokens.weight"),
        Row(f"{block}/self_attention_norm/scale", f"{layer}.input_layernorm.weight"),
        *linear(f"{block}/self_attention/query", f"{layer}.self_attn.q_proj", bias=False),
        *linear(f"{block}/self_attention/key", f"{layer}.self_attn.k_proj", bias=False),
        *linear(f"{block}/self_attention/value", f"{layer}.self_attn.v_proj", bias=False),
        *linear(f"{block}/self_attention/out", f"{layer}.self_attn.o_proj", bias=False),
        Row(f"{block}/mlp_norm/scale", f"{layer}.post_attention_layernorm.weight"),
        *linear(f"{block}/mlp/gate", f"{layer}.mlp.gate_proj", bias=False),
        *linear(f"{block}/mlp/up", f"{layer}.mlp.up_proj", bias=False),
        *linear(f"{block}/mlp/down", f"{layer}.mlp.down_proj", bias=False),
        Row("decoder/final_norm/scale", "model.norm.weight"),
        *linear("unembedding", "lm_head", bias=False),
    ]
