"""EuroBERT (Boizard et al. 2025, arXiv 2503.05500): LLaMA's blocks with bidirectional attention."""

import dataclasses

from pretrainax.config import ModelConfig, RotaryPositions
from pretrainax.zoo import llama, rotary
from pretrainax.zoo.family import (
    NULLABLE,
    ConfigJson,
    Family,
    HuggingFace,
    NameRow,
    config_variants,
    token_classification_class,
)
from pretrainax.zoo.variants import pick

# variant -> (layers, width, feed-forward, heads, key heads)
SIZES = {
    "210m": (12, 768, 3072, 12, 12),
    "610m": (26, 1152, 4096, 18, 6),
    "2_1b": (32, 2304, 6144, 18, 6),
}


def eurobert(variant: str = "210m") -> ModelConfig:
    """Builds the model config of EuroBERT, with a context of 8,192 tokens; raises UserError for an unknown variant."""
    config = llama.decoder(
        *pick("eurobert", variant, SIZES),
        vocab_size=128_256,
        position=RotaryPositions(8192, theta=250_000.0),
        norm_epsilon=1e-5,
        tie_embeddings=False,
    )
    return dataclasses.replace(config, family="encoder")


def huggingface_names(config: ModelConfig) -> list[NameRow]:
    """Builds the table of tensor names in transformers' EuroBertForMaskedLM, which are the same as in LLaMA."""
    rows = llama.huggingface_names(config)
    return [row._replace(path=row.path.replace("decoder/", "encoder/", 1)) for row in rows]


def _base() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = eurobert("210m")
    config.num_kv_heads, config.position.theta = None, 10_000.0
    return config


def _write(config: ModelConfig) -> ConfigJson:
    return llama.write_heads(config) | rotary.write(config) | llama.NO_TOKENS


FAMILIES = (
    Family(
        name="EuroBERT",
        prefix="eurobert_",
        preset=eurobert,
        sizes=SIZES,
        paper="Boizard et al. 2025, arXiv 2503.05500",
        objective="masked language modelling in 15 languages",
        configs=config_variants("eurobert", SIZES),
        huggingface=HuggingFace(
            model_type="eurobert",
            architecture="EuroBertForMaskedLM",
            base=_base,
            fields=llama.FIELDS,
            table=huggingface_names,
            # There is no `sequence_classification_class`: EuroBertForSequenceClassification averages the logits of all
            # tokens, and this package has no head that averages logits.
            token_classification_class=token_classification_class("EuroBertForMaskedLM"),
            constants={"attention_bias": False, "mlp_bias": False},
            nullable=(*NULLABLE, "head_dim"),
            divisible=True,
            read=rotary.read,
            write=_write,
            tied=llama.tied,
            ignored=llama.IGNORED,
        ),
    ),
)
