"""Converts configs to and from JSON, and lists the differences between two configs."""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pretrainax.config.choice import Choice, fits, format_value, type_error_line
from pretrainax.config.experiment import Experiment
from pretrainax.config.former_fields import upgrade_fields
from pretrainax.config.values import range_problems, type_problems
from pretrainax.files.errors import UserError, nearest
from pretrainax.files.json_files import read_object


def to_json(config: object) -> Any:
    """Converts a config, or a value in a config, to JSON values (dicts, lists, strings, numbers, …).

    The dict of a Choice also contains the class name as "type". Fields defined by `optional_in_json` are omitted if
    they have their default value.
    """
    if dataclasses.is_dataclass(config):
        values = ((f, getattr(config, f.name)) for f in dataclasses.fields(config))
        fields = {f.name: to_json(x) for f, x in values if not ("later" in f.metadata and x == f.default)}
        return {"type": config.type_name(), **fields} if isinstance(config, Choice) else fields
    return [to_json(x) for x in config] if isinstance(config, (tuple, list)) else config


def from_json(cls: Any, value: object, path: str = "config") -> Any:
    """Converts JSON values from `to_json` to an instance of `cls`; accepts field names from earlier versions.

    Args:
      cls: a dataclass, Optional[dataclass], or the type of a value without fields.
      value: the JSON value.
      path: path of the value in the config, for errors.

    Raises:
      UserError: a field or class name is unknown, or a value has the wrong type.
    """
    if isinstance(value, dict):
        if "type" in value:
            cls = Choice.named(str(value["type"]))
        elif typing.get_origin(cls) in (typing.Union, types.UnionType):
            (cls,) = (t for t in typing.get_args(cls) if t is not type(None))
        value = upgrade_fields(cls.__name__, value)
        hints = typing.get_type_hints(cls, include_extras=True)
        for name in value.keys() - (fields := {f.name for f in dataclasses.fields(cls)}) - {"type"}:
            raise UserError(f"{path}: unknown field {name!r}, {nearest(name, fields)}")
        items = {k: from_json(hints[k], v, f"{path}.{k}") for k, v in value.items() if k != "type"}
        if invalid := [k for k, item in items.items() if not fits(item, hints[k])]:
            raise UserError("; ".join(type_error_line(f"{path}.{k}", items[k], hints[k]) for k in invalid))
        return cls(**items)
    return tuple(from_json(object, v, path) for v in value) if isinstance(value, list) else value


def differing_fields(configs: Sequence[Experiment]) -> dict[str, tuple[object, ...]]:
    """Finds the fields that affect a run's numerical results and differ between configs.

    Returns:
      {path of a field: its value in each config}, for example {"optimizer.learning_rate": (1e-3, 3e-3)}.
    """
    return dict(_compare(configs, ""))


def differences(old: Experiment, new: Experiment) -> list[str]:
    """Lists the `differing_fields` of two configs, one line each: "train.seed: 0 -> 1"."""
    fields = differing_fields((old, new))
    return [f"{path}: {format_value(a)} -> {format_value(b)}" for path, (a, b) in fields.items()]


def _compare(values: Sequence[object], path: str) -> Iterator[tuple[str, tuple[object, ...]]]:
    first, tuples = values[0], [value for value in values if isinstance(value, tuple)]
    if dataclasses.is_dataclass(first) and all(type(value) is type(first) for value in values):
        for f in (f for f in dataclasses.fields(first) if not f.metadata.get("free")):
            yield from _compare([getattr(value, f.name) for value in values], f"{path}.{f.name}".lstrip("."))
    elif len(tuples) == len(values) and len({*map(len, tuples)}) == 1 and any(map(dataclasses.is_dataclass, tuples[0])):
        for i, items in enumerate(zip(*tuples, strict=True)):
            yield from _compare(items, f"{path}[{i}]")
    elif any(value != first for value in values):
        yield path, tuple(values)


def load(path: str) -> Experiment:
    """Reads a run's config from the config.json at `path`.

    Raises:
      UserError: the file is not a valid config.
    """
    try:
        experiment = from_json(Experiment, read_object(path))
    except (ValueError, TypeError, RecursionError) as e:
        raise UserError(f"{path} is not a run config ({e})") from e
    if not isinstance(experiment, Experiment):
        raise UserError(f"{path} is not a run config: it contains a {type(experiment).__name__}")
    if problems := [*type_problems(experiment), *range_problems(experiment)]:
        raise UserError(f"{path}: {'; '.join(problems)}")
    return experiment


def dump(experiment: Experiment) -> str:
    return json.dumps(to_json(experiment), indent=2) + "\n"
