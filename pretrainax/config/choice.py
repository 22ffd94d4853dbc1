"""Fields that offer alternatives: a `Choice` is an object of the class that does the work, with its own fields."""

import ast
import dataclasses
import importlib
import importlib.metadata
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pretrainax.config.errors import UserError, nearest

if typing.TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment


BUILT_IN = (  # the modules that have the choices of this package
    "pretrainax.tokenization",
    "pretrainax.data.sources",
    "pretrainax.data.objectives",
    "pretrainax.data.packing",
    "pretrainax.data.preparation.filters",
    "pretrainax.layers.positions",
    "pretrainax.optim",
)
ENTRY_POINTS = "pretrainax.choices"  # the group of those in which other packages name theirs


def free(default: object) -> Any:
    """Returns a field that may differ between a run and its resumption: no mathematics, or the answer to a fault."""
    return dataclasses.field(default=default, metadata={"free": True})


class Choice:
    """Base of the dataclasses that one field offers as alternatives. JSON names them by their class.

    A class of another package is a choice as soon as it is imported, as a config file does. To be found by its name
    alone, in a flag or the config.json of a run, it is an entry point of its package:

        [project.entry-points."pretrainax.choices"]
        MyOptimizer = "mypackage.optim:MyOptimizer"
    """

    _classes: ClassVar[dict[str, type["Choice"]]] = {}  # by module:name
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]  # which each that can be chosen has

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Choice._classes[f"{cls.__module__}:{cls.__qualname__}"] = cls

    @staticmethod
    def imported() -> list[type["Choice"]]:
        """Returns all classes there are so far, abstract ones too."""
        return list(Choice._classes.values())

    @classmethod
    def type_name(cls) -> str:
        """Returns what JSON calls the class: `AdamW`, or of another package `mypackage.optim:MyOptimizer`."""
        return cls.__name__ if _is_built_in(cls) else f"{cls.__module__}:{cls.__qualname__}"

    @staticmethod
    def named(name: str) -> type["Choice"]:
        """Returns the choice that `type_name` calls so, or whose class has this name; built-in ones come first.

        A name may come from anybody's config.json, so it never decides what is imported: only the modules of this
        package are, and entry points of installed ones.

        Raises:
          UserError: there is none, with the nearest names.
        """
        for module in BUILT_IN:
            importlib.import_module(module)  # which registers its choices
        if name not in _choices_by_name():
            _import_entry_points(name.rpartition(":")[2])
        choices = _choices_by_name()
        if name in choices:
            return choices[name]
        module, _, class_name = name.rpartition(":")
        if module:
            raise UserError(
                f"choice {name!r} is of another package, which is not imported: import {module} in the config file, or "
                f"install the package with the entry point {class_name} = {name} of the group {ENTRY_POINTS}"
            )
        raise UserError(f"unknown choice {name!r}, {nearest(name, (n for n in choices if ':' not in n))}")

    @staticmethod
    def parse(text: str) -> "Choice":
        """Reads `"TextFiles(path='my/books', valid_fraction=0.05)"`, as a flag gives it for a whole field.

        Values are literals, choices and tuples of them. Nothing is evaluated.
        """
        try:
            return _choice(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError):
            raise UserError(f"cannot read {text!r}; write Name or Name(field=value, ...)") from None

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        """Yields a line for each thing that cannot work: value got, what is allowed, field to set."""
        yield from ()


def _is_built_in(cls: type[Choice]) -> bool:
    return cls.__module__.startswith("pretrainax.")


def _choices_by_name() -> dict[str, type[Choice]]:
    classes = [cls for cls in Choice.imported() if "__dataclass_fields__" in vars(cls)]  # no abstract ones
    classes.sort(key=_is_built_in)  # so that they win where two have the same name
    return {cls.__name__: cls for cls in classes} | {cls.type_name(): cls for cls in classes}


def _import_entry_points(class_name: str) -> None:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=class_name):
        try:
            entry.load()
        except (ImportError, AttributeError) as e:
            raise UserError(f"entry point {entry.name} = {entry.value} cannot be imported ({e})") from e


def _choice(node: ast.expr) -> Choice:
    """Makes the choice of a name or a call; SyntaxError or ValueError where it is neither."""
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args:
        raise SyntaxError
    values = {}
    for keyword in call.keywords:
        if keyword.arg is None:  # **
            raise SyntaxError
        values[keyword.arg] = _value(keyword.value)
    name = call.func.id
    cls = Choice.named(name)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for field in values.keys() - fields:
        raise UserError(f"{name} has no field {field!r}, {nearest(field, fields)}")
    for field in fields.keys() - values:
        if fields[field].default is fields[field].default_factory is dataclasses.MISSING:
            raise UserError(f"{name} needs a value for {field!r}: write {name}({field}=...)")
    hints = typing.get_type_hints(cls, include_extras=True)
    for field, value in values.items():
        if not fits(value, hints[field]):
            raise UserError(f"{name}.{field} is {value!r}, it must be {spelled(hints[field])}")
    return cls(**values)


def fits(value: object, hint: object) -> bool:
    """Says if a value is of the type of a field."""
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return value in kinds
    if origin is Annotated:  # a type, and a word
        return value in kinds[1:] or fits(value, kinds[0])
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, kind) for kind in kinds)
    if origin is tuple:
        if kinds[-1] is ...:
            kinds = kinds[:1] * len(value) if isinstance(value, tuple) else ()
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(fits, value, kinds))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def spelled(hint: object) -> str:
    """Returns a type as error lines have it: "of type int", "'stop' or 'skip'"."""
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is Annotated:
        kind, *words = typing.get_args(hint)
        return " or ".join([spelled(kind), *map(repr, words)])
    return f"of type {hint.__name__ if isinstance(hint, type) else hint}"


def _value(node: ast.expr) -> object:
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(map(_value, node.elts))
    return _choice(node) if isinstance(node, (ast.Call, ast.Name)) else ast.literal_eval(node)
