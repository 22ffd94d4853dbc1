"""Which layers are local: `ModelConfig.layer_pattern` and what config.json says of each layer."""

from collections.abc import Mapping, Sequence
from typing import Any, Optional

from pretrainax.config import ModelConfig, UserError

_KINDS = {"full_attention": "global", "sliding_attention": "local"}  # theirs, in `layer_types` -> ours


def kinds(config: ModelConfig) -> list[str]:
    """Of each layer."""
    return [config.layer_pattern[i % len(config.layer_pattern)] for i in range(config.num_layers)]


def pattern(kinds: Sequence[str], usual: tuple[str, ...]) -> tuple[str, ...]:
    """What, repeated, gives the kinds of all layers: `usual`, or else the shortest."""
    kinds, many = tuple(kinds), len(kinds)
    candidates = (usual, *(kinds[:n] for n in range(1, many + 1)))
    return next(candidate for candidate in candidates if (candidate * many)[:many] == kinds)


def read(json: Mapping[str, Any], config: ModelConfig, window: Optional[int], otherwise: Sequence[str]) -> None:
    """Sets `layer_pattern` by `layer_types`, and `window` where a layer is local.

    Args:
      window: what config.json says of it.
      otherwise: the kind of each layer where config.json has no `layer_types`.
    """
    types = json.get("layer_types")
    if types is not None:
        if set(types) - set(_KINDS) or len(types) != config.num_layers:
            raise UserError(
                f"config.json has {len(types)} layer_types of {sorted(set(types))} for {config.num_layers} layers; "
                f"known: {', '.join(_KINDS)}"
            )
        otherwise = [_KINDS[kind] for kind in types]
    config.layer_pattern = pattern(otherwise, usual=config.layer_pattern)
    config.window = window if "local" in otherwise else None
    if "local" in otherwise and window is None:
        raise UserError("config.json has layers of sliding_attention and no sliding_window")


def write(config: ModelConfig) -> dict[str, Any]:
    theirs = {ours: kind for kind, ours in _KINDS.items()}
    return {"layer_types": [theirs[kind] for kind in kinds(config)], "sliding_window": config.window}
