"""Reads study files and ladder files: TOML tables that have the fields of a dataclass (`study.Study`)."""

import dataclasses
import tomllib
import types
import typing
from typing import NoReturn, Optional, Union

from pretrainax.config import from_json
from pretrainax.config.choice import Choice, default_of, fits, type_error_line
from pretrainax.files.errors import UserError, nearest
from pretrainax.files.regular_files import read_bytes
from pretrainax.studies.study import Study

T = typing.TypeVar("T")


@dataclasses.dataclass
class _File(Study):
    """A study file; its arms share the config and the flags at the top level."""

    config: Optional[str] = None
    flags: tuple[str, ...] = ()  # flags of all arms, which precede the flags of each arm


def read_study(path: str) -> Study:
    """Reads a study file; `checks.check_study` checks the values. Errors as in `read_file`."""
    return study_from(_table(path), path)


def study_from(table: dict[str, object], path: str) -> Study:
    """Converts the tables of a study file to a `Study`; arguments and errors as in `from_table`."""
    file = from_table(_File, table, path)
    arms = [
        dataclasses.replace(arm, config=arm.config or file.config or "", flags=(*file.flags, *arm.flags))
        for arm in file.arms
    ]
    if problems := [f"arms[{i}].config is missing" for i, arm in enumerate(arms) if not arm.config]:
        raise_problems(path, problems)
    fields = {field.name: getattr(file, field.name) for field in dataclasses.fields(Study)}
    fields["arms"] = tuple(arms)
    return Study(**fields)


def read_file(kind: type[T], path: str) -> T:
    """Reads a TOML file that has the fields of a dataclass.

    Raises:
      UserError: the file is missing or not TOML, or fields are unknown, missing or of the wrong type. The message lists
        all of them, each with its place in the file, for example "arms[1].flags".
    """
    return from_table(kind, _table(path), path)


def from_table(kind: type[T], table: dict[str, object], path: str) -> T:
    """Converts the tables of a file to a dataclass; also the output of `config.to_json`.

    Raises:
      UserError: as in `read_file`; `path` is the name of the file in the message.
    """
    problems: list[str] = []
    found = _read(kind, table, "", problems)
    if problems:
        raise_problems(path, problems)
    return typing.cast(T, found)


def _table(path: str) -> dict[str, object]:
    """Reads a TOML file; errors as in `read_file`."""
    try:
        return tomllib.loads(read_bytes(path).decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise UserError(f"{path} is not a TOML file: {e}") from e
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}") from e


def raise_problems(path: str, problems: list[str]) -> NoReturn:
    """Raises a UserError that lists problems of a study file; a problem starts with its place in the file."""
    raise UserError("; ".join(f"{path}: {problem}" for problem in problems))


def _read(kind: type, value: object, place: str, problems: list[str]) -> object:
    """Converts a TOML value to a dataclass, and appends a line to `problems` for each field that is wrong."""
    if not isinstance(value, dict):
        problems.append(f"{place} is {value!r}, it must be a table")
        return None
    if issubclass(kind, Choice):
        try:
            return from_json(kind, _with_choices(kind.named(str(value.get("type", ""))), value), place)
        except (UserError, TypeError) as e:  # TypeError: a required field is missing
            problems.append(f"{place}: {e}" if isinstance(e, TypeError) or place not in str(e) else str(e))
            return None
    hints, fields = typing.get_type_hints(kind), {f.name: f for f in dataclasses.fields(kind)}
    places = {name: f"{place}.{name}".lstrip(".") for name in (*fields, *value)}
    problems += [f"{places[name]} is no field, {nearest(name, fields)}" for name in value if name not in fields]
    required = [name for name, field in fields.items() if default_of(field) is dataclasses.MISSING]
    missing = [name for name in required if name not in value]
    problems += [f"{places[name]} is missing" for name in missing]
    known = {name: item for name, item in value.items() if name in fields}
    values = {name: _convert(hints[name], item, places[name], problems) for name, item in known.items()}
    return kind(**values) if not missing else None


def _with_choices(cls: type[Choice], value: dict) -> dict:
    """Parses the strings in fields of `cls` that hold a choice, as in source = "TextFiles(path='heldout')"."""

    def parsed(hint: object, item: object) -> object:
        kinds = (hint, *typing.get_args(hint))
        kind = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Choice)), None)
        return kind.parse(item) if kind is not None and isinstance(item, str) else item

    hints = typing.get_type_hints(cls)
    return {name: parsed(hints.get(name), item) for name, item in value.items()}


def _convert(hint: object, value: object, place: str, problems: list[str]) -> object:
    """Converts a TOML value to a field's type; appends a line to `problems` if it does not fit."""
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        (hint,) = (kind for kind in kinds if kind is not type(None))
        return None if value is None else _convert(hint, value, place, problems)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _read(hint, value, place, problems)
    if origin is dict and isinstance(value, dict):
        return {key: _convert(kinds[1], item, f"{place}.{key}", problems) for key, item in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        items = [_convert(kinds[0], item, f"{place}[{i}]", problems) for i, item in enumerate(value)]
        return tuple(items)
    if origin is dict or not fits(value, hint):
        problems.append(type_error_line(place, value, hint))
    return value
