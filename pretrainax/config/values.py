"""Iterates over the fields of a config, and checks the types and ranges of their values."""

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from pretrainax.config.choice import Choice, default_of, field_names, fits, type_error_line
from pretrainax.config.experiment import Experiment
from pretrainax.files.errors import nearest
from pretrainax.files.paths import path_problem

PATH_FIELDS = (
    "path",
    "valid_path",
    "cache_dir",
    "local_dir",
    "init_from",
    "teacher",
    "word_list",
    "similar_words",
)  # names of fields that contain paths
# The path fields whose value may also be a model on the Hugging Face Hub.
_HUB_FIELDS = ("config.checkpoint.init_from", "config.distill.teacher", "config.tokenizer.path")
MAX_LAYERS = 10_000  # above any real model; validation iterates over all layers, even of an untrusted config
_MODEL_RANGE, _LAYERS_RANGE = (-(2**31), 2**31 - 1), (-(2**31), MAX_LAYERS)
_RANGES = {  # field -> (minimum, maximum); other fields have the range of int64
    "config.train.steps": (-(2**31), 2**31 - 1),  # an int32 counter on the devices
    "config.train.global_batch_size": (-(2**31), 2**31 - 1),
    "config.data.sequence_length": (-(2**31), 2**31 - 1),
    # JAX keys truncate larger seeds
    **{f"config.train.{use}seed": (-(2**31), 2**32 - 1) for use in ("", "init_", "order_", "dropout_", "mask_")},
}


def fields(config: Any, path: str = "config") -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, type annotation, value) for each field of a config, recursively.

    A path is, for example, "config.data.source".

    Args:
      config: a config, or a section of one.
      path: path of `config`, which prefixes the field paths.
    """
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        field_path, value = f"{path}.{field.name}", getattr(config, field.name)
        yield field_path, hints[field.name], value
        for section_path, section in _sections(field_path, value):
            yield from fields(section, section_path)


def _sections(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields (path, section) for a field whose value has fields, or for each item of a tuple that has fields."""
    items = ((f"{path}[{i}]", item) for i, item in enumerate(value)) if isinstance(value, tuple) else [(path, value)]
    for item_path, item in items:
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            yield item_path, item


class LeafField(NamedTuple):
    """A config field without nested fields ("train.steps"), or the class of a Choice ("optimizer.type")."""

    path: str
    value: object  # value of the field; for the class of a Choice, the name of the class
    default: object  # dataclasses.MISSING: the field is required; None for the class of a Choice without a default
    is_free: bool  # True if the field does not affect the mathematics of the run


def leaf_fields(config: object, path: str = "", is_free: bool = False) -> Iterator[LeafField]:
    """Yields a LeafField for each config field without nested fields, and for the class of each Choice.

    Args:
      config: an `Experiment`, or a section of one.
      path: path of the section, which prefixes its field paths, or "" if `config` is an `Experiment`.
      is_free: True if no field of `config` affects the run's numerical results.
    """
    assert dataclasses.is_dataclass(config)
    for field in dataclasses.fields(config):
        field_path, value, default = f"{path}.{field.name}".lstrip("."), getattr(config, field.name), default_of(field)
        items, is_field_free = value if isinstance(value, tuple) else (), is_free or "free" in field.metadata
        if dataclasses.is_dataclass(value):
            yield from _nested_leaf_fields(value, field_path, default, is_field_free)
        elif any(map(dataclasses.is_dataclass, items)):
            for i, item in enumerate(items):
                yield from _nested_leaf_fields(item, f"{field_path}[{i}]", None, is_field_free)
        else:
            yield LeafField(field_path, value, default, is_field_free)


def _nested_leaf_fields(config: object, path: str, default: object, is_free: bool) -> Iterator[LeafField]:
    """Yields the leaf fields of a nested config, given the default value of the field that contains it."""
    if isinstance(config, Choice) and Choice not in type(config).__bases__:  # its kind has alternatives
        name = default.type_name() if isinstance(default, Choice) else None
        yield LeafField(f"{path}.type", config.type_name(), name, is_free)
    yield from leaf_fields(config, path, is_free)


def type_problems(experiment: Experiment) -> Iterator[str]:
    """Yields an error message for each value of the wrong type, and for each attribute that is not a field.

    Literal fields are checked by `validate`.
    """
    yield from _unknown_attributes("config", experiment)
    for path, hint, value in fields(experiment):
        if typing.get_origin(hint) is not typing.Literal and not fits(value, hint):
            yield type_error_line(path, value, hint)
        for section_path, section in _sections(path, value):
            yield from _unknown_attributes(section_path, section)


def _unknown_attributes(path: str, section: object) -> Iterator[str]:
    """Yields an error message for each attribute that code has set and no class declares (a misspelled field).

    The classes of other packages may have additional attributes.
    """
    for name in vars(section) if type(section).__module__.startswith("pretrainax.") else ():
        if not hasattr(type(section), name) and name not in field_names(section):
            yield f"{path} has no field {name!r}, {nearest(name, field_names(section))}"


def range_problems(experiment: Experiment) -> Iterator[str]:
    """Yields an error message for each number that is out of range or not finite, and for each invalid file path."""
    for path, _, value in fields(experiment):
        if isinstance(value, int):
            lowest, highest = _range_of(path)
            if not lowest <= value <= highest:
                limit = f"at most {highest}" if value > highest else f"at least {lowest}"
                yield f"{path} is {_format_int(value)}, it must be {limit}"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{path} is {value}, it must be a finite number"
        elif isinstance(value, str) and path.rpartition(".")[2] in PATH_FIELDS:
            if problem := path_problem(value, path in _HUB_FIELDS):
                yield f"{path} is {value!r}: {problem}"


def _range_of(path: str) -> tuple[int, int]:
    if path.startswith("config.model."):
        return _LAYERS_RANGE if path.endswith(("layers", ".depth")) else _MODEL_RANGE
    return _RANGES.get(path, (-(2**63), 2**63 - 1))


def _format_int(number: int) -> str:
    """Formats an integer, or its size in bits if it is huge, as Python cannot format thousands of digits."""
    return str(number) if number.bit_length() < 300 else f"of {number.bit_length():,} bits"
