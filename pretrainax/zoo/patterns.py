"""Converts local and global layers between `ModelConfig.layer_pattern` and `layer_types` of config.json.

The layers repeat `layer_pattern`, such as ("global", "local"). `layer_types` has one entry per layer.
"""

from collections.abc import Sequence
from typing import Optional

from pretrainax.config import ModelConfig, UserError
from pretrainax.zoo.family import ConfigJson

KINDS = {"full_attention": "global", "sliding_attention": "local"}  # in `layer_types` -> in `layer_pattern`


def kinds(config: ModelConfig) -> list[str]:
    """Returns "global" or "local" for each layer: `config.layer_pattern`, repeated over all layers."""
    return [config.layer_pattern[i % len(config.layer_pattern)] for i in range(config.num_layers)]


def shortest(kinds: Sequence[str], usual: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a pattern for `layer_pattern` whose repetition gives the kinds of all layers.

    Args:
      kinds: "global" or "local" for each layer.
      usual: the pattern to return if its repetition gives `kinds`; otherwise the result is the shortest such pattern.
    """
    wanted, count = tuple(kinds), len(kinds)
    candidates = (usual, *(wanted[:n] for n in range(1, count + 1)))
    return next(candidate for candidate in candidates if (candidate * count)[:count] == wanted)


def read(json: ConfigJson, config: ModelConfig, window: Optional[int], otherwise: Sequence[str]) -> None:
    """Sets `config.layer_pattern` from `layer_types`, and sets `config.window` if any layer is local.

    Args:
      window: the window that config.json specifies, in tokens.
      otherwise: "global" or "local" for each layer, for a config.json without `layer_types`.
    """
    types = json.get("layer_types")
    if types is not None:
        if set(types) - set(KINDS) or len(types) != config.num_layers:
            raise UserError(
                f"config.json has {len(types)} layer_types of {sorted(set(types))} for {config.num_layers} layers; "
                f"known: {', '.join(KINDS)}"
            )
        otherwise = [KINDS[kind] for kind in types]
    config.layer_pattern = shortest(otherwise, usual=config.layer_pattern)
    config.window = window if "local" in otherwise else None
    if "local" in otherwise and window is None:
        raise UserError("config.json has layers of sliding_attention and no sliding_window")


def write(config: ModelConfig) -> ConfigJson:
    return {"layer_types": layer_types(config), "sliding_window": config.window}


def layer_types(config: ModelConfig) -> list[str]:
    """Returns `layer_types` of config.json: "full_attention" or "sliding_attention" for each layer."""
    theirs = {ours: kind for kind, ours in KINDS.items()}
    return [theirs[kind] for kind in kinds(config)]
