"""Local and global layers: `ModelConfig.layer_pattern`, and `layer_types` of config.json."""

from collections.abc import Sequence
from typing import Optional

from pretrainax.config import ModelConfig, UserError
from pretrainax.zoo.family import ConfigJson

KINDS = {"full_attention": "global", "sliding_attention": "local"}  # of `layer_types` -> ours


def kinds(config: ModelConfig) -> list[str]:
    """Returns the kind of each layer, "global" or "local"."""
    return [config.layer_pattern[i % len(config.layer_pattern)] for i in range(config.num_layers)]


def shortest(kinds: Sequence[str], usual: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a pattern whose repetition gives the kinds of all layers: `usual` if it does, else the shortest."""
    wanted, count = tuple(kinds), len(kinds)
    candidates = (usual, *(wanted[:n] for n in range(1, count + 1)))
    return next(candidate for candidate in candidates if (candidate * count)[:count] == wanted)


def read(json: ConfigJson, config: ModelConfig, window: Optional[int], otherwise: Sequence[str]) -> None:
    """Sets `layer_pattern` from `layer_types`, and `window` if a layer is local.

    Args:
      window: the window of config.json, in tokens.
      otherwise: the kind of each layer if config.json has no `layer_types`.
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
    """Returns `layer_types` of config.json, the kind of each layer."""
    theirs = {ours: kind for kind, ours in KINDS.items()}
    return [theirs[kind] for kind in kinds(config)]
