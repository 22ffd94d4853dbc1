"""Converts mixtures of experts to and from transformers: tensor names, and config.json keys."""

from collections.abc import Callable

from pretrainax.config import ModelConfig
from pretrainax.layers.feed_forward import LayerGroup
from pretrainax.zoo.family import ConfigJson, NameRow, linear
from pretrainax.zoo.llama import BLOCK, LAYER, huggingface_names


def names(module: str, gate: str, up: str, down: str) -> Callable[[ModelConfig], list[NameRow]]:
    """Returns a function, used as `HuggingFace.table`, that builds the name table of a LLaMA-like class with experts.

    All layers of the class have experts.

    Args:
      module, gate, up, down: names in transformers, as for `rows`.
    """
    return lambda config: huggingface_names(config, lambda _: rows(module, gate, up, down))


def rows(module: str, gate: str, up: str, down: str) -> list[NameRow]:
    """Builds the name-table rows of the router and the experts, for files that store each expert's matrices separately.

    Args:
      module: transformers' name for a layer's mixture of experts, for example "mlp".
      gate, up, down: transformers' names for the matrices of an expert.
    """
    theirs = f"{LAYER}.{module}"
    table = linear(f"{BLOCK}/mlp/router", f"{theirs}.gate", bias=False)
    for ours, name in (("gate", gate), ("up", up), ("down", down)):
        table += linear(f"{BLOCK}/mlp/experts_{ours}", f"{theirs}.experts.{{expert}}.{name}", bias=False)
    return table


def rows_of_kind(kind: LayerGroup, stack: str, rows: list[NameRow]) -> list[NameRow]:
    """Restricts name-table rows to one group of layers; returns [] if the group is empty.

    Args:
      kind: the group of layers: with or without experts.
      stack: "encoder" or "decoder".
      rows: name-table rows for all layers of the stack.
    """
    path = f"{stack}/{kind.part}/blocks" if kind.part else f"{stack}/blocks"
    group_rows = [row._replace(path=row.path.replace(f"{stack}/blocks", path), layers=kind.numbers) for row in rows]
    return group_rows if kind.numbers else []


# Files written by transformers 5 give the number of experts as `num_local_experts`.
ALIASES = {"num_local_experts": "num_experts"}


def read(json: ConfigJson, config: ModelConfig, coefficient: float = 0.001) -> None:
    """Sets the weight of the balance loss from config.json.

    transformers counts each of a token's top_k experts in the balance loss, so our weight is top_k times
    `router_aux_loss_coef`, whose default is `coefficient`.
    """
    assert config.experts is not None
    config.experts.balance_weight = json.get("router_aux_loss_coef", coefficient) * config.experts.top_k


def write(config: ModelConfig) -> ConfigJson:
    assert config.experts is not None
    return {"router_aux_loss_coef": config.experts.balance_weight / config.experts.top_k}


def width(config: ModelConfig) -> ConfigJson:
    """Returns the config.json key for the width of an expert, which may equal the width of the dense feed-forward."""
    assert config.experts is not None
    return {"moe_intermediate_size": config.experts.d_ff or config.d_ff}
