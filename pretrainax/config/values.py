"""Walks the values of a config, and finds those that no run can have: of another type than their field, too large."""

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from pretrainax.config.choice import Choice, default_of, fits, misfit
from pretrainax.config.experiment import Experiment
from pretrainax.files.paths import path_problem

PATHS = (
    "path",
    "valid_path",
    "cache_dir",
    "local_dir",
    "init_from",
    "teacher",
    "word_list",
    "similar_words",
)  # names of fields
_OF_HUB = ("config.checkpoint.init_from", "config.distill.teacher", "config.tokenizer.path")  # models of it, too
MOST_LAYERS = 10_000  # more than any model has; each of them is looked at, also of a config that somebody else wrote
_OF_MODEL, _OF_LAYERS = (-(2**31), 2**31 - 1), (-(2**31), MOST_LAYERS)
_RANGES = {  # lowest and highest; of others what 64 bits hold
    "config.train.steps": (-(2**31), 2**31 - 1),  # counted on devices
    "config.train.global_batch_size": (-(2**31), 2**31 - 1),
    "config.data.sequence_length": (-(2**31), 2**31 - 1),
    # JAX's keys forget what is beyond
    **{f"config.train.{use}seed": (-(2**31), 2**32 - 1) for use in ("", "init_", "order_", "dropout_", "mask_")},
}


def fields(config: Any, path: str = "config") -> Iterator[tuple[str, Any, Any]]:
    """Yields path ("config.data.source"), type and value of each field of a config, of its parts and their choices."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        where, value = f"{path}.{field.name}", getattr(config, field.name)
        yield where, hints[field.name], value
        if dataclasses.is_dataclass(value):
            yield from fields(value, where)
        elif isinstance(value, tuple):
            for i, part in enumerate(value):
                if dataclasses.is_dataclass(part):
                    yield from fields(part, f"{where}[{i}]")


class Stated(NamedTuple):
    """A field of a config, or the class of one that offers alternatives."""

    path: str  # "train.steps", "optimizer.type"
    value: object
    default: object
    is_free: bool  # it changes no mathematics


def stated(config: object, path: str = "", is_free: bool = False) -> Iterator[Stated]:
    """Yields each field of the innermost parts of a config, and the name of the class of each part that is chosen.

    is_free: all of it changes no mathematics.
    """
    assert dataclasses.is_dataclass(config)
    for field in dataclasses.fields(config):
        where, value, default = f"{path}.{field.name}".lstrip("."), getattr(config, field.name), default_of(field)
        parts, free = value if isinstance(value, tuple) else (), is_free or "free" in field.metadata
        if dataclasses.is_dataclass(value):
            yield from _part(value, where, default, free)
        elif any(map(dataclasses.is_dataclass, parts)):
            for i, part in enumerate(parts):
                yield from _part(part, f"{where}[{i}]", None, free)
        else:
            yield Stated(where, value, default, free)


def _part(part: object, path: str, default: object, is_free: bool) -> Iterator[Stated]:
    if isinstance(part, Choice) and Choice not in type(part).__bases__:  # there are others of its kind
        name = default.type_name() if isinstance(default, Choice) else None
        yield Stated(f"{path}.type", part.type_name(), name, is_free)
    yield from stated(part, path, is_free)


def type_problems(experiment: Experiment) -> Iterator[str]:
    """Yields a line for each value that is not of the type of its field; of a wrong word `validate` says more."""
    for path, hint, value in fields(experiment):
        if typing.get_origin(hint) is not typing.Literal and not fits(value, hint):
            yield misfit(path, value, hint)


def range_problems(experiment: Experiment) -> Iterator[str]:
    """Yields a line for each number that is too large for the machine or not finite, and each impossible path."""
    for path, _, value in fields(experiment):
        if isinstance(value, int):
            lowest, highest = _range_of(path)
            if not lowest <= value <= highest:
                limit = f"at most {highest}" if value > highest else f"at least {lowest}"
                yield f"{path} is {_shown(value)}, it must be {limit}"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{path} is {value}, it must be a finite number"
        elif isinstance(value, str) and path.rpartition(".")[2] in PATHS:
            if problem := path_problem(value, path in _OF_HUB):
                yield f"{path} is {value!r}: {problem}"


def _range_of(path: str) -> tuple[int, int]:
    if path.startswith("config.model."):
        return _OF_LAYERS if path.endswith(("layers", ".depth")) else _OF_MODEL
    return _RANGES.get(path, (-(2**63), 2**63 - 1))


def _shown(number: int) -> str:
    """Writes a number; Python refuses to write one of thousands of digits."""
    return str(number) if number.bit_length() < 300 else f"of {number.bit_length():,} bits"
