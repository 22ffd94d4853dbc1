"""Converts layer kinds, "local" or "global", between `ModelConfig.layer_pattern` and config.json's `layer_types`.

`layer_pattern`, for example ("global", "local"), repeats over the layers. `layer_types` has one entry per layer.
"""

from collections.abc import Sequence

from pretrainax.config import ModelConfig, UserError
from pretrainax.zoo.family import ConfigJson

KINDS = {"full_attention": "global", "sliding_attention": "local"}  # name in `layer_types` -> name in `layer_pattern`


def kinds(config: ModelConfig) -> list[str]:
    """Returns the kind of each layer, "global" or "local", by repeating `config.layer_pattern` over all layers."""
    return [config.layer_pattern[i % len(config.layer_pattern)] for i in range(config.num_layers)]


def kinds_of(types: Sequence[str]) -> list[str]:
    """Converts `layer_types` to "global" or "local" for each layer; raises UserError for other kinds of layers."""
    if unknown := set(types) - set(KINDS):
        raise UserError(f"config.json has layer_types {sorted(unknown)}; supported: {', '.join(KINDS)}")
    return [KINDS[kind] for kind in types]


def shortest(kinds: Sequence[str], usual: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a `layer_pattern` that gives `kinds` when it is repeated over the layers.

    Args:
      kinds: "global" or "local" for each layer.
      usual: the preferred pattern. If repeating it does not give `kinds`, returns the shortest pattern that does.
    """
    all_kinds, count = tuple(kinds), len(kinds)
    candidates = (usual, *(all_kinds[:n] for n in range(1, count + 1)))
    return next(candidate for candidate in candidates if (candidate * count)[:count] == all_kinds)


def read(json: ConfigJson, config: ModelConfig, otherwise: Sequence[str]) -> None:
    """Sets `config.layer_pattern` from `layer_types`; sets `config.window` to None if no layer is local.

    Args:
      otherwise: "global" or "local" for each layer, used if config.json has no `layer_types`.

    Raises:
      UserError: `layer_types` is invalid, or a layer is local although `config.window` is None.
    """
    types = json.get("layer_types")
    if types is not None:
        otherwise = kinds_of(types)
    config.layer_pattern = shortest(otherwise, usual=config.layer_pattern)
    if "local" not in otherwise:
        config.window = None
    elif config.window is None:
        raise UserError("config.json has layers of sliding_attention and no sliding_window")


def drop_unused_window(json: ConfigJson, config: ModelConfig) -> None:
    """Sets `config.window` to None if `use_sliding_window` of config.json is false or absent."""
    if not json.get("use_sliding_window"):
        config.window = None


def read_uniform(json: ConfigJson, config: ModelConfig) -> None:
    """Sets `config.layer_pattern` of a class whose layers are all local if it has a window.

    Raises:
      UserError: the kinds in `layer_types`, which the class does not read, differ from this pattern.
    """
    config.layer_pattern = ("global",) if config.window is None else ("local",)
    types = json.get("layer_types")
    if types is not None and list(types) != layer_types(config):
        raise UserError(f"config.json has layer_types {types}, and its class gives all layers one kind: remove the key")


def write(config: ModelConfig) -> ConfigJson:
    """Returns the config.json keys for the kinds of layers and the window.

    Some classes need a window even if no layer is local; any number works then.
    """
    return {"layer_types": layer_types(config), "sliding_window": 4096 if config.window is None else config.window}


def layer_types(config: ModelConfig) -> list[str]:
    """Returns `layer_types` of config.json: "full_attention" or "sliding_attention" for each layer."""
    their_kinds = {ours: kind for kind, ours in KINDS.items()}
    return [their_kinds[kind] for kind in kinds(config)]
