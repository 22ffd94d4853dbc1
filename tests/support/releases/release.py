"""Defines the description of a release, and names and sizes that several releases share."""

from typing import Any, NamedTuple


class Release(NamedTuple):
    preset: str  # name of the preset in the zoo that equals the config
    tiny: dict[str, Any]  # fields of config.json with the sizes of a test
    names: str
    changes: dict[str, Any] = {}  # fields of the preset that this file omits
    base: str = ""  # prefix that the names in this file lack: "bert."


WB = "{weight,bias}"


def under(prefix: str, names: str) -> str:
    return " ".join(f"{prefix}.{name}" for name in names.split())


LLAMA_BLOCK = "self_attn.{q,k,v,o}_proj.weight mlp.{gate,up,down}_proj.weight {input,post_attention}_layernorm.weight"
LLAMA = f"model.embed_tokens.weight {under('model.layers.#', LLAMA_BLOCK)} model.norm.weight"

ENCODER_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 20,
    "vocab_size": 99,
}
LLAMA_SIZES = ENCODER_SIZES | {"num_key_value_heads": 2}
