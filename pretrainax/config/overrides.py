"""Sets config fields from flags: --config.train.steps=1e5, --config.schedule="WarmupLinear()"."""

import ast
import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from typing import Any, Optional

from pretrainax.config.auto import follow_budget
from pretrainax.config.choice import Choice, field_names, fits, format_type
from pretrainax.config.config_file import configs_like
from pretrainax.config.experiment import Experiment
from pretrainax.config.values import fields
from pretrainax.files.errors import UserError, nearest, shortened

_BOOLS: dict[str, bool] = {word: True for word in "true yes on t y 1".split()}
_BOOLS |= {word: False for word in "false no off f n 0".split()}
BUDGET = "config.train.budget"
FLAG = re.compile(r"--?[a-zA-Z]")  # does not match negative numbers
_OVERRIDE = re.compile(r"--?(no)?(config\.[^=]*)(?:=(.*))?", re.DOTALL)
_EXACT = 2**53  # floats represent all integers up to this value exactly


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, Optional[str]]]]:
    """Splits command-line arguments into absl's arguments and config overrides, e.g. ("config.train.steps", "5").

    The value of an override is None for a flag without a value, and "false" for --noconfig.FIELD.

    Raises:
      UserError: --noconfig.FIELD has a value.
    """
    words, overrides, remaining = [], [], list(argv)
    while remaining:
        word = remaining.pop(0)
        match = _OVERRIDE.fullmatch(word)
        if match is None:
            words.append(word)
            continue
        is_negated, path, text = match.groups()
        if is_negated and text is not None:
            raise UserError(f"{word}: --no… takes no value; write --{path}={text}")
        if text is None and not is_negated and remaining and not FLAG.match(remaining[0]):
            text = remaining.pop(0)
        overrides.append((path, "false" if is_negated else text))
    return words, overrides


def apply_overrides(experiment: Experiment, overrides: Sequence[tuple[str, Optional[str]]]) -> None:
    """Sets the fields of a config to the values that `split_overrides` returned, in order; `BUDGET` comes first."""
    for path, text in sorted(overrides, key=lambda override: override[0] != BUDGET):
        set_field(experiment, path, text)


def set_field(experiment: Experiment, path: str, text: Optional[str]) -> None:
    """Sets a config field to the parsed value of a flag.

    `config.train.budget` also resets the fields that follow from it, so it must be set before them.

    Args:
      experiment: the config; modified in place.
      path: path of the field, for example "config.train.steps" or "config.phases[0].share".
      text: value of the flag, or None for a flag without a value, which sets a bool field to True.

    Raises:
      UserError: the field does not exist, or the value is invalid.
    """
    node, parent, hint = experiment, "config", None
    *_, last_segment = segments = path.split(".")[1:]
    for i, segment in enumerate(segments):
        name, _, index = segment.removesuffix("]").partition("[")
        if node is None:
            raise UserError(f"--{path}: {parent} is None; set it first: --{parent}={format_type(hint)}")
        if isinstance(node, Choice) and name not in field_names(node):
            raise UserError(node.no_field(parent, name))
        if name not in field_names(node):
            raise UserError(f"{parent} has no field {name!r}, {_field_hint(name, node, experiment)}")
        hint = typing.get_type_hints(type(node), include_extras=True)[name]
        if i < len(segments) - 1 or index:
            node, parent = _tuple_item(getattr(node, name), index, f"{parent}.{name}"), f"{parent}.{segment}"
    if last_segment.endswith("]"):
        raise UserError(f'--{path}: set the whole tuple: --{path.rpartition("[")[0]}="({type(node).__name__}(), ...)"')
    if text is None and hint is not bool:
        raise UserError(f"--{path}=… needs a value, it must be {format_type(hint)}")
    setattr(node, last_segment, True if text is None else read_value(text, hint, path))
    if path == BUDGET and experiment.train.budget is not None:
        follow_budget(experiment)


def _tuple_item(value: object, index: str, path: str) -> object:
    """Returns item `index` of a tuple field, or `value` itself if `index` is empty.

    Args:
      value: value of the field.
      index: string between the brackets in a flag's path, or "" if there are no brackets.
      path: path of the field, for errors.
    """
    if not index:
        return value
    if isinstance(value, tuple) and index.isdecimal() and int(index) < len(value):
        return value[int(index)]
    allowed = (
        f"allowed: {path}[0] to [{len(value) - 1}]" if isinstance(value, tuple) and value else "the field has no items"
    )
    raise UserError(f"--{path}[{index}]: {allowed}")


def fields_named(name: str, experiment: Experiment) -> list[str]:
    """Lists the field paths that end with `name`: "config.train.steps" for "steps" or "train.steps"."""
    return [path for path, _, _ in fields(experiment) if path.endswith(f".{name}")]


def _field_hint(name: str, node: Any, experiment: Experiment) -> str:
    """Formats a hint for an unknown field: similar fields anywhere in the config, or else the fields of `node`."""
    if elsewhere := fields_named(name, experiment):
        return f"did you mean --{' or --'.join(elsewhere)}?"
    return nearest(name, field_names(node))


def read_value(text: str, hint: Any, path: str = "config") -> Any:
    """Parses a flag value as a config field's type; for example, `read_value("1e3", int)` returns 1000.

    "none" becomes None if the type allows None.

    Args:
      text: value of a flag.
      hint: type annotation of the field.
      path: path of the field, for errors.

    Raises:
      UserError: the string is not a value of this type, or the field is a config section.
    """
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if type(None) in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        if kind is not type(None):
            try:
                return _parse_as(text, kind, path)
            except UserError as e:
                raise UserError(f"--{path}={shortened(text)}: {e}") from e
            except (KeyError, ValueError, SyntaxError, OverflowError, RecursionError, MemoryError):
                continue
    raise UserError(f"--{path}={shortened(text)}: it must be {format_type(hint)}")


def _parse_as(text: str, kind: Any, path: str) -> Any:
    """Parses a string as a value of the single type `kind`; raises an error if that is impossible."""
    if kind is bool:
        return _BOOLS[text.lower()]
    if kind is int:
        return _parse_int(text)
    if kind is float:
        return float(text)
    if typing.get_origin(kind) is typing.Annotated:  # a type and a literal, for example 'auto'
        number_type, *literals = typing.get_args(kind)
        return text if text in literals else _parse_as(text, number_type, path)
    if typing.get_origin(kind) is tuple:
        return _parse_tuple(text, kind)
    if isinstance(kind, type) and issubclass(kind, Choice):
        return kind.parse(text)
    if dataclasses.is_dataclass(kind):
        first_field, similar = dataclasses.fields(kind)[0].name, configs_like(text)
        raise UserError(
            f"{path} is a config section: set its fields, such as --{path}.{first_field}=…; for a whole model use a "
            f"config: --config={similar[0] if similar else 't5_base:small'}"
        )
    return text  # `validate` checks Literal fields


def _parse_int(text: str) -> int:
    """Parses an integer (1000, 1_000 or 1e3); raises ValueError for any other string."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if abs(number) > _EXACT or number != int(number):
            raise
        return int(number)


def _parse_tuple(text: str, kind: Any) -> tuple:
    """Parses a tuple from a string: "(1, 2)", "1", "local,global" or "(Name(), Name())".

    A string with white space that is not a Python literal (a prompt) is one item.

    Args:
      kind: type annotation of the tuple.

    Raises:
      ValueError: the items do not match the type annotation.
    """
    item_type = typing.get_args(kind)[0]
    try:
        is_choice = isinstance(item_type, type) and issubclass(item_type, Choice)
        value = item_type.parse_several(text) if is_choice else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = (text,) if any(map(str.isspace, text)) else tuple(text.split(","))  # a prompt may have commas
    value = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not fits(value, kind):
        raise ValueError
    return value
