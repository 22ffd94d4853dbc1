"""Mixtures of experts in transformers: tensor names, and the keys of config.json for experts and the balance loss."""

from collections.abc import Callable

from pretrainax.config import ModelConfig
from pretrainax.layers.feed_forward import LayerGroup
from pretrainax.zoo.family import ConfigJson, NameRow, linear
from pretrainax.zoo.llama import BLOCK, LAYER, huggingface_names


def names(module: str, gate: str, up: str, down: str) -> Callable[[ModelConfig], list[NameRow]]:
    """Returns a function for `HuggingFace.table`: the name table of a LLaMA-like class with experts in all layers.

    The arguments are explained at `rows`.
    """
    return lambda config: huggingface_names(config, lambda _: rows(module, gate, up, down))


def rows(module: str, gate: str, up: str, down: str) -> list[NameRow]:
    """Returns the name-table rows of the router and the experts, for files with separate tensors per expert.

    Args:
      module: transformers' name of the mixture of experts in a layer, such as "mlp".
      gate, up, down: transformers' names of the matrices of an expert.
    """
    theirs = f"{LAYER}.{module}"
    table = linear(f"{BLOCK}/mlp/router", f"{theirs}.gate", bias=False)
    for ours, name in (("gate", gate), ("up", up), ("down", down)):
        table += linear(f"{BLOCK}/mlp/experts_{ours}", f"{theirs}.experts.{{expert}}.{name}", bias=False)
    return table


def rows_of_kind(kind: LayerGroup, stack: str, rows: list[NameRow]) -> list[NameRow]:
    """Returns `rows` restricted to the layers of one kind (with or without experts); [] if there are no such layers.

    Args:
      stack: "encoder" or "decoder".
      rows: name-table rows for all layers of the stack.
    """
    path = f"{stack}/{kind.part}/blocks" if kind.part else f"{stack}/blocks"
    placed = [row._replace(path=row.path.replace(f"{stack}/blocks", path), layers=kind.numbers) for row in rows]
    return placed if kind.numbers else []


def read(json: ConfigJson, config: ModelConfig) -> None:
    """Sets the number of experts (key of transformers 5) and the weight of the balance loss from config.json.

    The balance loss of transformers has a different scale: it counts each of the top_k experts of a token. Our weight
    is therefore top_k times the weight in config.json.
    """
    assert config.experts is not None
    config.experts.num_experts = json.get("num_local_experts", config.experts.num_experts)
    if "router_aux_loss_coef" in json:
        config.experts.balance_weight = json["router_aux_loss_coef"] * config.experts.top_k


def write(config: ModelConfig) -> ConfigJson:
    assert config.experts is not None
    return {"router_aux_loss_coef": config.experts.balance_weight / config.experts.top_k}
