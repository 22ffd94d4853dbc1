"""Defines cases of decoders at test size. Rows are longer than every window, and every pattern repeats."""

import dataclasses

from pretrainax.config import (
    LatentAttention,
    LearnedPositions,
    LinearScaling,
    LongContextScaling,
    LongRopeScaling,
    MixtureOfExperts,
    RotaryPositions,
    YarnScaling,
)
from pretrainax.zoo import deepseek, gemma, gpt, gpt_oss, llama, mistral, mixtral, olmo, phi, qwen, smollm
from tests.golden.case import VOCABULARY, Case, mixture

GPT1, GPT2, _, GPT_NEO = gpt.FAMILIES
(LLAMA,), (MISTRAL,), (MIXTRAL,), (SMOLLM,) = llama.FAMILIES, mistral.FAMILIES, mixtral.FAMILIES, smollm.FAMILIES
PHI, PHI3 = phi.FAMILIES
(GPT_OSS,) = gpt_oss.FAMILIES
QWEN2, QWEN3, QWEN3_MOE = qwen.FAMILIES
OLMO2, OLMOE, *_ = olmo.FAMILIES
_, DEEPSEEK2, DEEPSEEK3 = deepseek.FAMILIES
GEMMA1, GEMMA2, GEMMA3 = gemma.FAMILIES

SIZES = dict(vocab_size=VOCABULARY, num_layers=2, d_model=16, d_ff=48, num_heads=4)
LEARNED = SIZES | {"position": LearnedPositions(20)}
GROUPED = SIZES | {"num_kv_heads": 2, "position": RotaryPositions(20, theta=40.0)}
ALTERNATING = {"num_layers": 3, "window": 4}
# A head of width 8 has four frequencies. The scaling leaves one unchanged, scales one fully, and two partly.
SCALING = LongContextScaling(8.0, 1.0, 4.0, original_length=40)
STRETCHED = {"head_dim": 8, "position": RotaryPositions(20, theta=40.0, scaling=SCALING)}
GEMMA3_POSITIONS = RotaryPositions(20, theta=40.0, local_theta=10.0)


def case(family, variant, sizes, **changes):
    """Returns a case of a preset at test size."""
    return Case(dataclasses.replace(family.preset(variant), **sizes | changes), family)


# The scaling leaves one of two frequencies unchanged, and scales the other almost fully.
YARN = YarnScaling(4.0, fast=4.0, slow=0.5, original_length=30, mscale=0.9, mscale_all_dim=0.6)
LATENT = GROUPED | {
    "num_layers": 3,
    "num_kv_heads": None,
    "head_dim": 10,
    "latent_attention": LatentAttention(rank=12, query_rank=14, rotary_dim=4, value_dim=6),
    "position": RotaryPositions(20, theta=40.0, interleaved=True),
}


CASES = {
    "gpt1": case(GPT1, "117m", LEARNED, d_ff=64),
    "gpt2": case(GPT2, "124m", LEARNED),
    "gpt_neo": case(GPT_NEO, "125m", LEARNED, **ALTERNATING),
    "llama2": case(LLAMA, "2_7b", GROUPED, num_kv_heads=None),
    "llama3": case(LLAMA, "3_8b", GROUPED),
    "llama3_1": case(LLAMA, "3_1_8b", GROUPED, **STRETCHED),
    "llama3_2": case(LLAMA, "3_2_1b", GROUPED, **STRETCHED),
    "mistral": case(MISTRAL, "7b", GROUPED, window=4),
    "mistral_v0_3": case(MISTRAL, "7b_v0_3", GROUPED),
    "mixtral": case(MIXTRAL, "8x7b", GROUPED, experts=MixtureOfExperts(balance_weight=0.0)),
    "qwen2": case(QWEN2, "2_7b", GROUPED),
    "qwen2_5": case(QWEN2, "2_5_0_5b", GROUPED),
    "qwen3": case(QWEN3, "3_8b", GROUPED, head_dim=8),
    "qwen3_moe": case(
        QWEN3_MOE,
        "3_30b_a3b",
        GROUPED,
        head_dim=8,
        experts=MixtureOfExperts(num_experts=6, top_k=3, d_ff=24, balance_weight=0.0),
    ),
    "olmo2": case(OLMO2, "2_7b", GROUPED),
    "olmoe": case(
        OLMOE,
        "1b_7b",
        GROUPED,
        experts=MixtureOfExperts(num_experts=6, top_k=3, normalized=False, balance_weight=0.0),
    ),
    "deepseek_v2_lite": case(
        DEEPSEEK2,
        "v2_lite",
        LATENT,
        latent_attention=dataclasses.replace(LATENT["latent_attention"], query_rank=None),
        experts=mixture(DEEPSEEK2, "v2_lite", num_experts=6, top_k=3),
    ),
    "deepseek_v2": case(
        DEEPSEEK2,
        "v2",
        LATENT,
        position=dataclasses.replace(LATENT["position"], scaling=YARN),
        experts=mixture(DEEPSEEK2, "v2", num_experts=8, top_k=3, groups=4, top_groups=2),
    ),
    "deepseek_v3": case(
        DEEPSEEK3,
        "v3",
        LATENT | {"num_layers": 4},
        position=dataclasses.replace(LATENT["position"], scaling=YARN),
        experts=mixture(DEEPSEEK3, "v3", num_experts=8, top_k=3, groups=4, top_groups=2, first_dense=2, bias_rate=0.0),
    ),
    "phi1_5": case(PHI, "1_5", GROUPED, head_dim=8, position=RotaryPositions(20, theta=40.0, fraction=0.5)),
    "phi2": case(PHI, "2", SIZES, head_dim=10, position=RotaryPositions(20, theta=40.0, fraction=0.4)),
    "phi3": case(PHI3, "3_14b", GROUPED, window=4),
    "phi4": case(PHI3, "4_14b", GROUPED, head_dim=8, position=RotaryPositions(20, theta=40.0, fraction=0.75)),
    # All rows of phi3_5 are longer than the old context, and no row of phi4_mini is.
    "phi3_5": case(
        PHI3,
        "3_5_3_8b",
        GROUPED,
        position=RotaryPositions(20, theta=40.0, scaling=LongRopeScaling((1.0, 1.1), (1.5, 4.0), 5.0, 4)),
    ),
    "phi4_mini": case(
        PHI3,
        "4_3_8b",
        GROUPED,
        d_model=32,
        position=RotaryPositions(
            32, theta=40.0, fraction=0.75, scaling=LongRopeScaling((1.0, 1.1, 1.2), (1.5, 4.0, 8.0), 2.0, 16)
        ),
    ),
    "smollm3": case(
        SMOLLM, "3_3b", GROUPED, num_layers=5, position=RotaryPositions(20, theta=40.0, no_rotation_every=2)
    ),
    "gpt_oss": case(
        GPT_OSS,
        "20b",
        GROUPED,
        head_dim=8,
        **ALTERNATING,
        position=RotaryPositions(20, theta=40.0, scaling=YarnScaling(4.0, 4.0, 0.5, original_length=30, rounded=False)),
        experts=mixture(GPT_OSS, "20b", num_experts=6, top_k=3),
        gate_limit=1.5,
    ),
    "gemma1": case(GEMMA1, "1_2b", GROUPED, num_kv_heads=1, head_dim=8),
    "gemma2": case(GEMMA2, "2_2b", GROUPED, head_dim=8, **ALTERNATING),
    "gemma2_27b": case(GEMMA2, "2_27b", GROUPED, head_dim=8, attention_scale=4**-0.5, **ALTERNATING),
    "gemma3_1b": case(
        GEMMA3, "3_1b", GROUPED, num_layers=7, num_kv_heads=1, head_dim=8, window=4, position=GEMMA3_POSITIONS
    ),
    "gemma3": case(
        GEMMA3,
        "3_27b",
        GROUPED,
        num_layers=7,
        head_dim=8,
        window=4,
        attention_scale=4**-0.5,
        position=dataclasses.replace(GEMMA3_POSITIONS, scaling=LinearScaling(8.0)),
    ),
}
