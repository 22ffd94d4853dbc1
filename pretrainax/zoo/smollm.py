"""SmolLM 3 (Bakouch et al. 2025, a post of Hugging Face): LLaMA of which every fourth layer turns nothing."""

from typing import Optional

from pretrainax.config import ModelConfig, RotaryPositions, UserError
from pretrainax.zoo import llama, patterns
from pretrainax.zoo.family import (
    LAST,
    Classifier,
    ConfigJson,
    Family,
    HuggingFace,
    extractor,
    token_classifier,
    trained_by,
)
from pretrainax.zoo.variants import pick

SIZES = {"3_3b": (36, 2048, 11008, 16, 4)}  # variant -> (layers, width, feed-forward, heads, key heads)


def smollm(variant: str = "3_3b") -> ModelConfig:
    """Returns SmolLM 3, `release_size`; UserError for an unknown variant."""
    return llama.decoder(
        *pick("smollm", variant, SIZES),
        vocab_size=128_256,
        position=RotaryPositions(65_536, theta=5_000_000.0, no_rotation_every=4),
        norm_epsilon=1e-6,
        tie_embeddings=True,
    )


def _base() -> ModelConfig:
    """Returns what transformers takes where config.json is silent."""
    config = smollm()
    config.position.max_length, config.position.theta = 32_768, 2_000_000.0
    return config


def _turning(every: Optional[int], count: int) -> list[bool]:
    """Returns which of so many layers turn queries and keys."""
    return [every is None or bool(number % every) for number in range(1, count + 1)]


def _read(json: ConfigJson, config: ModelConfig) -> None:
    llama.read_rotary(json, config)
    every, turns = _read_turning(json, config)
    config.position.no_rotation_every = every
    window = json.get("sliding_window") if json.get("use_sliding_window") else None
    kinds = ["global" if turn or window is None else "local" for turn in turns]
    patterns.read(json, config, window, otherwise=kinds)


def _read_turning(json: ConfigJson, config: ModelConfig) -> tuple[Optional[int], list[bool]]:
    """Returns `no_rotation_every`, and which layers turn. NOTE A 1 of `no_rope_layers` is a layer that does."""
    said, every = json.get("no_rope_layers"), json.get("no_rope_layer_interval", 4)
    if said is None:
        return every, _turning(every, config.num_layers)
    if len(said) < config.num_layers:
        raise UserError(f"config.json has {len(said)} no_rope_layers for {config.num_layers} layers")
    turns = [bool(turn) for turn in said[: config.num_layers]]
    first = turns.index(False) + 1 if False in turns else None
    for candidate in (every, first):
        if _turning(candidate, config.num_layers) == turns:
            return candidate, turns
    raise UserError(f"config.json has no_rope_layers {said}; only every n-th layer without rotation is known")


def _write(config: ModelConfig) -> ConfigJson:
    every = config.position.no_rotation_every
    turns = [int(turn) for turn in _turning(every, config.num_layers)]
    json = llama.write_heads(config) | llama.write_rotary(config) | patterns.write(config) | llama.NO_TOKENS
    json |= {"no_rope_layers": turns, "use_sliding_window": config.window is not None}
    return json if every is None else json | {"no_rope_layer_interval": every}


FAMILIES = (
    Family(
        name="SmolLM 3",
        prefix="smollm",
        preset=smollm,
        sizes=SIZES,
        paper="Bakouch et al. 2025, huggingface.co/blog/smollm3",
        objective="causal language modelling",
        configs=trained_by("smollm", SIZES),
        huggingface=HuggingFace(
            model_type="smollm3",
            architecture="SmolLM3ForCausalLM",
            base=_base,
            fields=llama.FIELDS,
            table=llama.huggingface_names,
            classifier=Classifier("SmolLM3ForSequenceClassification", LAST),
            token_classifier=token_classifier("SmolLM3ForCausalLM", "score"),
            extractor=extractor("SmolLM3ForCausalLM", base="transformer"),
            constants={"attention_bias": False, "mlp_bias": False},
            read=_read,
            write=_write,
            tied=llama.tied,
            ignored=llama.IGNORED,
        ),
    ),
)
