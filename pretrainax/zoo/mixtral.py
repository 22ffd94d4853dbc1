"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with eight experts, two per token."""

from pretrainax.config import LongRopeScaling, MixtureOfExperts, ModelConfig, RotaryPositions, UserError, YarnScaling
from pretrainax.zoo import experts, llama, patterns, rotary
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

# variant -> (layers, width, feed-forward, heads, key heads, positions, router_aux_loss_coef of config.json)
SIZES = {
    "8x7b": (32, 4096, 14336, 32, 8, 32_768, 0.02),
    "8x22b": (56, 6144, 16384, 48, 8, 65_536, 0.001),
}


def mixtral(variant: str = "8x7b") -> ModelConfig:
    """Builds the model config of Mixtral, version 0.1; raises UserError for an unknown variant."""
    *sizes, positions, balance = pick("mixtral", variant, SIZES)
    return llama.decoder(
        *sizes,
        vocab_size=32_000,
        position=RotaryPositions(positions, theta=1_000_000.0),
        norm_epsilon=1e-5,
        tie_embeddings=False,
        experts=MixtureOfExperts(num_experts=8, top_k=2, balance_weight=2 * balance),
    )


def _base() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = mixtral("8x7b")
    config.position.max_length = 131_072
    return config


def _read(json: ConfigJson, config: ModelConfig) -> None:
    rotary.read(json, config)
    experts.read(json, config)
    if config.head_dim is None and isinstance(config.position.scaling, YarnScaling | LongRopeScaling):
        raise UserError("config.json scales rotary positions and has no head_dim, which transformers then needs")
    patterns.read_uniform(json, config)


def _write(config: ModelConfig) -> ConfigJson:
    return llama.write_heads(config) | rotary.write(config) | experts.write(config)


FAMILIES = (
    Family(
        name="Mixtral",
        prefix="mixtral_",
        preset=mixtral,
        sizes=SIZES,
        paper="Jiang et al. 2024, arXiv 2401.04088",
        objective="causal language modelling",
        configs=config_variants("mixtral", SIZES),
        huggingface=HuggingFace(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            base=_base,
            fields=llama.FIELDS
            | {
                "sliding_window": "window",
                "num_local_experts": "experts.num_experts",
                "num_experts_per_tok": "experts.top_k",
            },
            table=experts.names("block_sparse_moe", gate="w1", up="w3", down="w2"),
            sequence_classification_class=TaskClass("MixtralForSequenceClassification", LAST),
            token_classification_class=token_classification_class("MixtralForCausalLM", "score"),
            question_answering_class=question_answering_class("MixtralForCausalLM"),
            nullable=("sliding_window", "head_dim"),
            aliases={"num_experts": "num_local_experts"},
            read=_read,
            write=_write,
            tied=llama.tied,
            ignored=llama.IGNORED,
        ),
    ),
)
