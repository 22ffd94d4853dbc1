"""Grok-1 (xAI 2024, the released model.py and run.py): eight experts, two per token; two norms per sublayer."""

from pretrainax.config import MixtureOfExperts, ModelConfig, RotaryPositions
from pretrainax.zoo import llama
from pretrainax.zoo.family import Family, config_variants
from pretrainax.zoo.variants import pick

SIZES = {"1_314b": (64, 6144, 32_768, 48, 8)}  # variant -> (layers, width, width of an expert, heads, key heads)


def grok(variant: str = "1_314b") -> ModelConfig:
    """Builds the model config of Grok-1; raises UserError for an unknown variant."""
    return llama.decoder(
        *pick("grok", variant, SIZES),
        vocab_size=131_072,
        position=RotaryPositions(8192),
        norm_at="both",
        norm_epsilon=1e-5,
        activation="gelu_tanh",
        scale_embeddings=True,  # embedding_multiplier_scale in run.py
        logit_scale=3**-0.5,  # output_multiplier_scale in run.py
        attention_logit_cap=30.0,
        # An expert's weight is its probability in the softmax over all eight experts.
        experts=MixtureOfExperts(num_experts=8, top_k=2, normalized=False),
    )


FAMILIES = (
    Family(
        name="Grok-1",
        prefix="grok",
        preset=grok,
        sizes=SIZES,
        paper="xAI 2024, github.com/xai-org/grok-1",
        objective="causal language modelling",
        configs=config_variants("grok", SIZES),
        huggingface=None,
    ),
)
