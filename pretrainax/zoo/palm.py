"""PaLM (Chowdhery et al. 2022, arXiv 2204.02311): parallel attention and MLP, multi-query attention, no biases."""

from pretrainax.config import ModelConfig, RotaryPositions
from pretrainax.zoo.family import Family, config_variants
from pretrainax.zoo.variants import pick

# variant -> (layers, width, heads), from table 1. Heads have width 256.
SIZES = {"8b": (32, 4096, 16), "62b": (64, 8192, 32), "540b": (118, 18432, 48)}


def palm(variant: str = "8b") -> ModelConfig:
    """Builds the model config of PaLM; raises UserError for an unknown variant."""
    num_layers, d_model, num_heads = pick("palm", variant, SIZES)
    return ModelConfig(
        family="decoder",
        vocab_size=256_000,
        num_layers=num_layers,
        d_model=d_model,
        d_ff=4 * d_model,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=256,
        position=RotaryPositions(2048),
        norm="layer",
        norm_at="pre",
        parallel=True,
        activation="silu",
        gated=True,
        use_bias=False,
        scale_tied_logits=True,  # section 5: divides logits by sqrt(width)
        init_stddev=None,  # section 5: scaled by fan-in; embeddings have a standard deviation of 1
    )


FAMILIES = (
    Family(
        name="PaLM",
        prefix="palm_",
        preset=palm,
        sizes=SIZES,
        paper="Chowdhery et al. 2022, arXiv 2204.02311",
        objective="causal language modelling",
        configs=config_variants("palm", SIZES),
        huggingface=None,
    ),
)
