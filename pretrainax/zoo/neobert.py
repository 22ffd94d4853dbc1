"""NeoBERT (Le Breton et al. 2025, arXiv 2502.19587): BERT base, deeper, with LLaMA's blocks.

NOTE The released file rotates neighbouring dimensions, and stores queries, keys and values of each head side by side: a
permutation of the rows of these kernels. transformers has no class for it, and nothing here reads that file.
"""

import dataclasses

from pretrainax.config import ModelConfig, RotaryPositions
from pretrainax.zoo import llama
from pretrainax.zoo.family import Family, trained_by
from pretrainax.zoo.variants import pick

SIZES = {"base": (28, 768, 2048, 12, 12)}  # variant -> (layers, width, feed-forward, heads, key heads)


def neobert(variant: str = "base") -> ModelConfig:
    """Returns NeoBERT, with a context of 4,096 tokens; raises UserError for an unknown variant."""
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
        configs=trained_by("neobert", SIZES),
        huggingface=None,
    ),
)
