"""ST-MoE (Zoph et al. 2022, arXiv 2202.08906): T5 1.1 with experts in every fourth layer, two experts per token.

In layers with experts, an additional dense feed-forward sublayer follows the experts.
"""

from pretrainax.config import MixtureOfExperts, ModelConfig
from pretrainax.zoo import t5
from pretrainax.zoo.family import Family, config_variants
from pretrainax.zoo.variants import pick

# variant -> (layers of each stack, width, feed-forward, heads, head dimension, experts)
SIZES = {"l": (24, 1024, 2816, 16, 64, 32), "32b": (24, 5120, 20_480, 64, 128, 64)}


def st_moe(variant: str = "l") -> ModelConfig:
    """Builds the model config of ST-MoE; raises UserError for an unknown variant."""
    layers, d_model, d_ff, num_heads, head_dim, num_experts = pick("st_moe", variant, SIZES)
    config = t5.t5("large")
    config.num_layers, config.d_model, config.d_ff = layers, d_model, d_ff
    config.num_heads, config.head_dim = num_heads, head_dim
    config.experts = MixtureOfExperts(
        num_experts=num_experts,
        top_k=2,
        normalized=False,
        every=4,
        dense_after=d_ff,
        balance_weight=0.01,
        z_weight=0.001,
    )
    return config


FAMILIES = (
    Family(
        name="ST-MoE",
        prefix="st_moe_",
        preset=st_moe,
        sizes=SIZES,
        paper="Zoph et al. 2022, arXiv 2202.08906",
        objective="span corruption",
        configs=config_variants("st_moe", SIZES),
        huggingface=None,
    ),
)
