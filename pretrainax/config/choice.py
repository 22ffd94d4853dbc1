"""Fields that offer alternatives: a `Choice` is an object of the class that does the work, with its own fields."""

import ast
import dataclasses
import importlib
import types
import typing
from collections.abc import Iterator
from typing import Any, ClassVar

from pretrainax.config.errors import UserError, nearest

if typing.TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment


def free(default: Any) -> Any:
    """A field that may differ between a run and its resumption: no mathematics, or the answer to a fault."""
    return dataclasses.field(default=default, metadata={"free": True})


class Choice:
    """Base of the dataclasses that one field offers as alternatives. JSON names them by their class."""

    _classes: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Choice._classes[cls.__name__] = cls

    @staticmethod
    def named(name: str) -> type:
        """The choice of this class name; UserError with the nearest ones where there is none."""
        for module in "tokenization data.sources data.objectives data.packing data.preparation.filters optim".split():
            importlib.import_module(f"pretrainax.{module}")  # which registers its choices
        choices = {k: c for k, c in Choice._classes.items() if "__dataclass_fields__" in vars(c)}  # no abstract ones
        if name not in choices:
            raise UserError(f"unknown choice {name!r}, {nearest(name, choices)}")
        return choices[name]

    @staticmethod
    def parse(text: str) -> "Choice":
        """`"TextFiles(path='my/books', valid_fraction=0.05)"` as the object; what a flag gives for a whole field.

        Values are literals, choices and tuples of them. Nothing is evaluated.
        """
        try:
            return _choice(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, AttributeError):
            raise UserError(f"cannot read {text!r}; write Name or Name(field=value, ...)") from None

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        """One line for each thing that cannot work: value got, what is allowed, field to set."""
        yield from ()


def _choice(node: ast.expr) -> Choice:
    """Of a name or a call; SyntaxError, ValueError or AttributeError where it is neither."""
    name = node.func.id if isinstance(node, ast.Call) else node.id
    values = {k.arg: _value(k.value) for k in getattr(node, "keywords", ())}
    if getattr(node, "args", ()) or None in values:  # without a name, and **
        raise SyntaxError
    cls = Choice.named(name)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for field in values.keys() - fields:
        raise UserError(f"{name} has no field {field!r}, {nearest(field, fields)}")
    for field in fields.keys() - values:
        if fields[field].default is fields[field].default_factory is dataclasses.MISSING:
            raise UserError(f"{name} needs a value for {field!r}: write {name}({field}=...)")
    hints = typing.get_type_hints(cls)
    for field, value in values.items():
        if not fits(value, hints[field]):
            kind = hints[field].__name__ if isinstance(hints[field], type) else hints[field]
            raise UserError(f"{name}.{field} is {value!r}, it must be of type {kind}")
    return cls(**values)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the type of a field."""
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, kind) for kind in kinds)
    if origin is tuple:
        if kinds[-1] is ...:
            kinds = kinds[:1] * len(value) if isinstance(value, tuple) else ()
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(fits, value, kinds))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _value(node: ast.expr) -> Any:
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(map(_value, node.elts))
    return _choice(node) if isinstance(node, (ast.Call, ast.Name)) else ast.literal_eval(node)
