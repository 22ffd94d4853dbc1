"""SmolLM 3 (Bakouch et al. 2025, Hugging Face blog): LLaMA without rotary positions in every fourth layer."""

from typing import Optional

from pretrainax.config import ModelConfig, RotaryPositions, UserError
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

SIZES = {"3_3b": (36, 2048, 11008, 16, 4)}  # variant -> (layers, width, feed-forward, heads, key heads)


def smollm(variant: str = "3_3b") -> ModelConfig:
    """Builds the model config of SmolLM 3; raises UserError for an unknown variant.

    Args:
      variant: release and size; "3_3b" is the only variant.
    """
    return llama.decoder(
        *pick("smollm", variant, SIZES),
        vocab_size=128_256,
        position=RotaryPositions(65_536, theta=5_000_000.0, no_rotation_every=4),
        norm_epsilon=1e-6,
        tie_embeddings=True,
    )


def _base() -> ModelConfig:
    """Builds the model config with transformers' defaults, which apply to keys missing from config.json."""
    config = smollm()
    config.position.max_length, config.position.theta = 32_768, 2_000_000.0
    return config


def _rotating_layers(every: Optional[int], count: int) -> list[bool]:
    """Returns True for each layer that applies rotary positions to queries and keys, and False for other layers.

    Args:
      every: if n, every n-th layer has no rotary positions. If None, all layers have rotary positions.
      count: the number of layers.
    """
    return [every is None or bool(number % every) for number in range(1, count + 1)]


def _read(json: ConfigJson, config: ModelConfig) -> None:
    rotary.read(json, config)
    every, rotating = _read_rotating_layers(json, config)
    config.position.no_rotation_every = every
    patterns.drop_unused_window(json, config)
    kinds = ["global" if rotates or config.window is None else "local" for rotates in rotating]
    patterns.read(json, config, otherwise=kinds)


def _read_rotating_layers(json: ConfigJson, config: ModelConfig) -> tuple[Optional[int], list[bool]]:
    """Reads the layers that apply rotary positions from config.json.

    NOTE In `no_rope_layers` of config.json, 1 means a layer with rotary positions.

    Returns:
      The value of `no_rotation_every`, and for each layer True if it applies rotary positions.

    Raises:
      UserError: the layers without rotary positions are not evenly spaced.
    """
    flags, every = json.get("no_rope_layers"), config.position.no_rotation_every
    if flags is None:
        return every, _rotating_layers(every, config.num_layers)
    if len(flags) < config.num_layers:
        raise UserError(f"config.json has {len(flags)} no_rope_layers for {config.num_layers} layers")
    rotating = [bool(flag) for flag in flags[: config.num_layers]]
    first_unrotated = rotating.index(False) + 1 if False in rotating else None
    for candidate in (every, first_unrotated):
        if _rotating_layers(candidate, config.num_layers) == rotating:
            return candidate, rotating
    raise UserError(f"config.json has no_rope_layers {flags}; only every n-th layer may be without rotation")


def _write(config: ModelConfig) -> ConfigJson:
    every = config.position.no_rotation_every
    rotating = [int(rotates) for rotates in _rotating_layers(every, config.num_layers)]
    json = llama.write_heads(config) | rotary.write(config) | patterns.write(config) | llama.NO_TOKENS
    return json | {"no_rope_layers": rotating, "use_sliding_window": config.window is not None}


FAMILIES = (
    Family(
        name="SmolLM 3",
        prefix="smollm",
        preset=smollm,
        sizes=SIZES,
        paper="Bakouch et al. 2025, huggingface.co/blog/smollm3",
        objective="causal language modelling",
        configs=config_variants("smollm", SIZES),
        huggingface=HuggingFace(
            model_type="smollm3",
            architecture="SmolLM3ForCausalLM",
            base=_base,
            fields=llama.FIELDS | {"sliding_window": "window", "no_rope_layer_interval": "position.no_rotation_every"},
            table=llama.huggingface_names,
            sequence_classification_class=TaskClass("SmolLM3ForSequenceClassification", LAST),
            token_classification_class=token_classification_class("SmolLM3ForCausalLM", "score"),
            question_answering_class=question_answering_class("SmolLM3ForCausalLM", base="transformer"),
            constants={"attention_bias": False, "mlp_bias": False},
            read=_read,
            write=_write,
            tied=llama.tied,
            ignored=llama.IGNORED,
        ),
    ),
)
