"""NeoBERT (Le Breton et al. 2025, arXiv 2502.19587): as wide as BERT base, with more layers and LLaMA's blocks.

NOTE This package cannot read the released file, and transformers has no class for NeoBERT. The released file orders the
outputs of the query, key and value projections differently: rotary positions apply to pairs of adjacent dimensions, and
the projections are interleaved by head.
"""

import dataclasses

from pretrainax.config import ModelConfig, RotaryPositions
from pretrainax.zoo import llama
from pretrainax.zoo.family import Family, config_variants
from pretrainax.zoo.variants import pick

SIZES = {"base": (28, 768, 2048, 12, 12)}  # variant -> (layers, width, feed-forward, heads, key heads)


def neobert(variant: str = "base") -> ModelConfig:
    """Builds the model config of NeoBERT, with a context of 4,096 tokens; raises UserError for an unknown variant."""
    config = llama.decoder(
        *pick("neobert", variant, SIZES),
        vocab_size=30_522,
        position=RotaryPositions(4096),
        norm_epsilon=1e-5,
        output_bias=True,
        tie_embeddings=False,
    )
    return dataclasses.replace(config, family="encoder")


FAMILIES = (
    Family(
        name="NeoBERT",
        prefix="neobert_",
        preset=neobert,
        sizes=SIZES,
        paper="Le Breton et al. 2025, arXiv 2502.19587",
        objective="masked language modelling",
        configs=config_variants("neobert", SIZES),
        huggingface=None,
    ),
)
