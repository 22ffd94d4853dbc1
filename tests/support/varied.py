"""Generates models that differ from a published model in one field."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pretrainax.config import (
    Classify,
    LearnedPositions,
    LinearScaling,
    LongContextScaling,
    LongRopeScaling,
    ModelConfig,
    NoPositions,
    RandomBlocks,
    RotaryPositions,
    SinusoidalPositions,
    SlidingWindows,
    YarnScaling,
)
from pretrainax.config.validation import model_problems
from pretrainax.interop.architectures import ANY_EXPERIMENT

# Fields that do not affect an export, and fields that the tests vary separately.
_SKIPPED = {"family", "parts", "multi_token", "generator", "init_stddev", "dropout_rate", "attention_dropout_rate"}


def variations(config: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    """Yields the changed field with its value, and the model; all models are valid configs."""
    for path, value in _changes(config):
        *parents, name = path.split(".")
        changed = dataclasses.replace(config)
        if parents:
            part = dataclasses.replace(getattr(config, parents[0]), **{name: value})
            changed = dataclasses.replace(config, **{parents[0]: part})
        else:
            changed = dataclasses.replace(config, **{name: value})
        if "window" not in path:  # consistent with the layer pattern
            has_local = "local" in changed.layer_pattern
            changed.window = (changed.window or 4) if has_local else None
        if changed != config and not list(model_problems(dataclasses.replace(ANY_EXPERIMENT, model=changed))):
            yield f"{path}={value!r}", changed


def _changes(config: ModelConfig) -> Iterator[tuple[str, Any]]:
    for field, hint in typing.get_type_hints(ModelConfig, include_extras=True).items():
        if field not in _SKIPPED:
            yield from ((field, value) for value in _others(field, hint, getattr(config, field), config))
    for part in ("position", "experts", "latent_attention", "sparse_attention"):
        value = getattr(config, part)
        for field, hint in typing.get_type_hints(type(value), include_extras=True).items() if value is not None else ():
            if field in vars(value):
                yield from ((f"{part}.{field}", x) for x in _others(field, hint, getattr(value, field), config))


def _others(field: str, hint: Any, value: Any, config: ModelConfig) -> list[Any]:
    """Returns other values of a field; some of them are valid."""
    rotated = config.position.rotated_dims(config.position_dim) if isinstance(config.position, RotaryPositions) else 8
    factors = tuple(1.0 + i / 8 for i in range(rotated // 2))
    special: dict[str, list[Any]] = {
        "position": [NoPositions(), LearnedPositions(20), SinusoidalPositions(), RotaryPositions(20, theta=40.0)],
        "layer_pattern": [("global",), ("local",), ("local", "global"), ("local", "local", "global")],
        "sparse_attention": [None, SlidingWindows(), RandomBlocks(4)],
        "scaling": [
            None,
            LinearScaling(2.0),
            LongContextScaling(4.0, original_length=10),
            YarnScaling(4.0, original_length=10),
            YarnScaling(4.0, original_length=10, rounded=False),
            YarnScaling(4.0, original_length=10, mscale=0.7, mscale_all_dim=0.7),
            LongRopeScaling(factors, factors[::-1], factor=2.0, original_length=10),
        ],
        "head": [None, Classify(num_labels=3, hidden="none")],
        "fraction": [None, 0.5],
        "vocab_size": [config.vocab_size + 1],
    }
    if field in special:
        return special[field]
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, typing.Annotated) else (hint,)
    others: list[Any] = [None] if type(None) in kinds else []
    literals = [x for kind in kinds if typing.get_origin(kind) is Literal for x in typing.get_args(kind)]
    if literals:
        return others + literals
    if bool in kinds:
        others += [True, False]
    elif int in kinds:
        others += [1, 2, 3] if not value else [value + 1, 2 * value, max(1, value // 2), 1]
    elif float in kinds:
        others += [0.5, 3.0]
    return [x for x in others if x != value]
