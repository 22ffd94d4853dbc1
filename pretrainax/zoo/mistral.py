"""Mistral 7B (Jiang et al. 2023, arXiv 2310.06825): LLaMA with grouped-query attention and a sliding window."""

from pretrainax.config import ModelConfig, RotaryPositions
from pretrainax.zoo import llama, patterns, rotary
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

# variant -> (layers, width, feed-forward, heads, key heads, vocabulary, rotary theta, window)
SIZES = {
    "7b": (32, 4096, 14336, 32, 8, 32_000, 10_000.0, 4096),
    "7b_v0_3": (32, 4096, 14336, 32, 8, 32_768, 1_000_000.0, None),
}


def mistral(variant: str = "7b") -> ModelConfig:
    """Builds the model config of Mistral 7B, version 0.1 or 0.3; raises UserError for an unknown variant."""
    *sizes, vocab_size, theta, window = pick("mistral", variant, SIZES)
    return llama.decoder(
        *sizes,
        vocab_size=vocab_size,
        position=RotaryPositions(32_768, theta=theta),  # as in the released config.json; the paper's table has 8,192
        layer_pattern=("global",) if window is None else ("local",),
        window=window,
        norm_epsilon=1e-5,
        tie_embeddings=False,
    )


def _base() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = mistral("7b")
    config.norm_epsilon, config.position.max_length = 1e-6, 131_072
    return config


def _read(json: ConfigJson, config: ModelConfig) -> None:
    rotary.read(json, config)
    patterns.read_uniform(json, config)


FAMILIES = (
    Family(
        name="Mistral",
        prefix="mistral_",
        preset=mistral,
        sizes=SIZES,
        paper="Jiang et al. 2023, arXiv 2310.06825",
        objective="causal language modelling",
        configs=config_variants("mistral", SIZES),
        huggingface=HuggingFace(
            model_type="mistral",
            architecture="MistralForCausalLM",
            base=_base,
            fields=llama.FIELDS | {"sliding_window": "window"},
            table=llama.huggingface_names,
            sequence_classification_class=TaskClass("MistralForSequenceClassification", LAST),
            token_classification_class=token_classification_class("MistralForCausalLM", "score"),
            question_answering_class=question_answering_class("MistralForCausalLM"),
            nullable=("sliding_window", "head_dim"),
            read=_read,
            write=lambda config: llama.write_heads(config) | rotary.write(config),
            tied=llama.tied,
            ignored=llama.IGNORED,
        ),
    ),
)
