"""Sets single fields of a config, as flags give them: --config.train.steps=1e5, --config.schedule="WarmupLinear()"."""

import ast
import dataclasses
import types
import typing
from typing import Any, Optional

from pretrainax.config.choice import Choice, fits, spelled
from pretrainax.config.config_file import configs_like
from pretrainax.config.experiment import Experiment
from pretrainax.config.values import fields
from pretrainax.files.errors import UserError, nearest, shortened

_BOOLS: dict[str, bool] = {word: True for word in "true yes on t y 1".split()}
_BOOLS |= {word: False for word in "false no off f n 0".split()}
_EXACT = 2**53  # up to here each whole number is a float too


def set_field(experiment: Experiment, path: str, text: Optional[str]) -> None:
    """Sets a field to the value that `read_value` makes of a text; UserError where there is no such field.

    Args:
      path: of the field, as "config.train.steps" or "config.phases[0].share".
      text: None where a flag stands without a value, as those that are true or false may.
    """
    node, done, hint = experiment, "config", None
    *_, last = words = path.split(".")[1:]
    for i, word in enumerate(words):
        name, _, place = word.removesuffix("]").partition("[")
        if node is None:
            raise UserError(f"--{path}: {done} is None; give it first, as --{done}={spelled(hint)}")
        if isinstance(node, Choice) and name not in node.__dataclass_fields__:
            raise UserError(node.no_field(done, name))
        if name not in getattr(node, "__dataclass_fields__", ()):
            raise UserError(f"{done} has no field {name!r}, {_known(name, node, experiment)}")
        hint = typing.get_type_hints(type(node), include_extras=True)[name]
        if i < len(words) - 1 or place:
            node, done = _part(getattr(node, name), place, f"{done}.{name}"), f"{done}.{word}"
    if last.endswith("]"):
        raise UserError(
            f'--{path}: parts are given all at once, as --{path.rpartition("[")[0]}="({type(node).__name__}(), ...)"'
        )
    if text is None and hint is not bool:
        raise UserError(f"--{path} needs a value: --{path}=… it must be {spelled(hint)}")
    setattr(node, last, True if text is None else read_value(text, hint, path))


def _part(value: object, place: str, path: str) -> object:
    """Returns the value of a field, or of a tuple that it holds the part at a place, from 0."""
    if not place:
        return value
    if isinstance(value, tuple) and place.isdecimal() and int(place) < len(value):
        return value[int(place)]
    there = (
        f"its parts are {path}[0] to [{len(value) - 1}]" if isinstance(value, tuple) and value else "it has no parts"
    )
    raise UserError(f"--{path}[{place}]: {there}")


def fields_named(name: str, experiment: Experiment) -> list[str]:
    """Returns the paths that end with a name, or names: "config.train.steps" of "steps" and of "train.steps"."""
    return [path for path, _, _ in fields(experiment) if path.endswith(f".{name}")]


def _known(name: str, node: Any, experiment: Experiment) -> str:
    if elsewhere := fields_named(name, experiment):
        return f"did you mean --{' or --'.join(elsewhere)}?"
    return nearest(name, getattr(node, "__dataclass_fields__", ()))


def read_value(text: str, hint: Any, path: str = "config") -> Any:
    """Returns the value of a field: `read_value("1e3", int)` is 1000, "none" None where the field may be None.

    Args:
      hint: the type of the field.
      path: of the field, for the error.

    Raises:
      UserError: the text is no value of this type, or the field is a part whose fields are set one by one.
    """
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if type(None) in kinds and text.lower() == "none":
        return None
    for kind in kinds:
        if kind is not type(None):
            try:
                return _read(text, kind, path)
            except UserError as e:
                raise UserError(f"--{path}={shortened(text)}: {e}") from e
            except (KeyError, ValueError, SyntaxError, OverflowError, RecursionError, MemoryError):
                continue
    raise UserError(f"--{path}={shortened(text)}: it must be {spelled(hint)}")


def _read(text: str, kind: Any, path: str) -> Any:
    if kind is bool:
        return _BOOLS[text.lower()]
    if kind is int:
        return _whole(text)
    if kind is float:
        return float(text)
    if typing.get_origin(kind) is typing.Annotated:  # a type, and a word
        number, *words = typing.get_args(kind)
        return text if text in words else _read(text, number, path)
    if typing.get_origin(kind) is tuple:
        return _tuple(text, kind)
    if isinstance(kind, type) and issubclass(kind, Choice):
        return kind.parse(text)
    if dataclasses.is_dataclass(kind):
        first, like = dataclasses.fields(kind)[0].name, configs_like(text)
        raise UserError(
            f"{path} has fields, which are set one by one, as --{path}.{first}=…; whole models are configs, as "
            f"--config={like[0] if like else 't5_base:small'}"
        )
    return text  # of words, `validate` says which are known


def _whole(text: str) -> int:
    """Reads 1000, 1_000 or 1e3; ValueError for what is not exactly a whole number."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if abs(number) > _EXACT or number != int(number):
            raise
        return int(number)


def _tuple(text: str, kind: Any) -> tuple:
    """Reads (1, 2), 1, local,global or (Name(), Name()); ValueError for what is no tuple of this type."""
    first = typing.get_args(kind)[0]
    try:
        is_choice = isinstance(first, type) and issubclass(first, Choice)
        value = first.parse_several(text) if is_choice else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = tuple(text.split(","))
    value = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not fits(value, kind):
        raise ValueError
    return value
