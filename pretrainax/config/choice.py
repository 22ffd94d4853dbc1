"""Implements config fields with alternatives: their value is a `Choice`, an instance of one of several dataclasses."""

import ast
import dataclasses
import importlib
import importlib.metadata
import itertools
import os
import re
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Optional

from pretrainax.files.errors import UserError, nearest, shortened

if typing.TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment


BUILT_IN = (  # modules of this package that define subclasses of Choice
    "pretrainax.tokenization",
    "pretrainax.data.sources",
    "pretrainax.data.objectives",
    "pretrainax.data.packing",
    "pretrainax.data.preparation.filters",
    "pretrainax.layers.positions",
    "pretrainax.optim",
    "pretrainax.adapt",
    "pretrainax.distill",
    "pretrainax.tasks",
    "pretrainax.interop.adaptations",
    "pretrainax.trackers",
)
ENTRY_POINTS = "pretrainax.choices"  # entry point group for choices of other packages


def resumable_field(default: object) -> Any:
    """Returns a dataclass field that may change when a run resumes.

    It does not change the mathematics of the run, or it configures the handling of faults.
    """
    return dataclasses.field(default=default, metadata={"free": True})


def optional_in_json(default: object, is_free: bool = True) -> Any:
    """Returns a dataclass field that config.json omits if it has its default value.

    A new version of PretrainAX can then add the field without changing the config.json of runs that do not use it.

    is_free: if True, the field may change when a run resumes, as with `resumable_field`.
    """
    return dataclasses.field(default=default, metadata={"free": is_free, "later": True})


class Choice:
    """Base class of the dataclasses that are the alternatives for a config field; JSON stores the class name.

    A class of another package is available after its import, for example by a config file. A flag or the config.json
    of a run can also name a class that is not imported yet, if its package has an entry point for the class:

        [project.entry-points."pretrainax.choices"]
        MyOptimizer = "mypackage.optim:MyOptimizer"
    """

    _classes: ClassVar[dict[str, type["Choice"]]] = {}  # all imported subclasses, by "module:name"
    endings: ClassVar[tuple[str, ...]] = ()  # suffixes of the files that the class reads, such as ".txt"; (): no files
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]  # concrete subclasses are dataclasses

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Choice._classes[f"{cls.__module__}:{cls.__qualname__}"] = cls

    @staticmethod
    def imported() -> list[type["Choice"]]:
        """Returns all subclasses of Choice that have been imported, including abstract classes."""
        return list(Choice._classes.values())

    @staticmethod
    def alternatives(kind: type["Choice"]) -> list[type["Choice"]]:
        """Returns the concrete subclasses of `kind` in this package: the values of a config field of this type."""
        import_built_in()
        return [cls for cls in Choice.imported() if issubclass(cls, kind) and _is_built_in(cls) and _is_complete(cls)]

    @classmethod
    def type_name(cls) -> str:
        """Returns the name of the class in JSON: `AdamW`, or `mypackage.optim:MyOptimizer` for other packages."""
        return cls.__name__ if _is_built_in(cls) else f"{cls.__module__}:{cls.__qualname__}"

    @classmethod
    def named(cls, name: str) -> type["Choice"]:
        """Returns the concrete subclass of this class with a `type_name` or class name.

        Classes of this package take precedence. The name can come from an untrusted config.json, so the name never
        selects a module to import. Only the modules of this package and the entry points of installed packages are
        imported.

        Raises:
          UserError: no subclass has this name; the error contains the most similar names.
        """
        import_built_in()
        if name not in _choices_by_name():
            _import_entry_points(name.rpartition(":")[2])
        choices = {n: choice for n, choice in _choices_by_name().items() if issubclass(choice, cls)}
        if name in choices:
            return choices[name]
        module, _, class_name = name.rpartition(":")
        if module:
            raise UserError(
                f"choice {name!r} belongs to a package that is not imported: import {module} in the config file, or "
                f"install the package with the entry point {class_name} = {name} in the group {ENTRY_POINTS}"
            )
        kind = "choice" if cls is Choice else cls.__name__
        raise UserError(f"unknown {kind} {shortened(name)!r}, {nearest(name, (n for n in choices if ':' not in n))}")

    @classmethod
    def parse(cls, text: str) -> "Choice":
        """Creates an instance from a flag value such as `"TextFiles(path='my/books', valid_fraction=0.05)"`.

        The values in parentheses are literals, nested instances of Choice, and tuples of both; no code is executed.
        Call this method on the type of the config field, so that errors can suggest alternatives.

        Raises:
          UserError: the text is not such a value, or the class does not exist or does not belong to the field.
        """
        try:
            return _choice(ast.parse(text, mode="eval").body, cls)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: too deeply nested
            error = UserError(f"cannot read {shortened(text)!r}; write Name or Name(field=value, ...)")
        except UserError as e:
            error = e
        if re.fullmatch(r"[^()]*[^()\w][^()]*|\w+", text) and (choices := cls.taking_path(text)):
            calls = " or ".join(f"{name}(path={text!r})" for name in choices)
            kind = "is a folder" if os.path.isdir(os.path.expanduser(text)) else "is a file"
            if os.path.exists(os.path.expanduser(text)):
                error = UserError(f"{text!r} {kind}: did you mean {calls}?")
            elif os.sep in text:
                error = UserError(f"{text!r} looks like a path but does not exist: did you mean {calls}?")
        raise error from None

    @classmethod
    def parse_several(cls, text: str) -> tuple:
        """Parses a tuple of instances, such as `"(Phase(share=0.9), Phase())"`; one instance becomes a tuple of one."""
        try:
            node = ast.parse(text.strip(), mode="eval").body
            items = node.elts if isinstance(node, (ast.Tuple, ast.List)) else [node]
            return tuple(_choice(item, cls) for item in items)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise UserError(f"cannot read {shortened(text)!r}; write (Name(field=value, ...), ...)") from None

    @classmethod
    def reader_of(cls, path: str) -> Optional[str]:
        """Returns the name of the class whose `endings` contain the suffix of a file; None if there is no such class.

        path: a file, or a folder; for a folder, the first of its files whose suffix any class reads counts.
        """
        names = [path]
        if os.path.isdir(path):
            names = sorted(name for _, _, names in itertools.islice(os.walk(path), 100) for name in names)
        kinds = [kind for kind in _choices_by_name().values() if kind.endings]
        return next((kind.__name__ for name in names for kind in kinds if name.endswith(kind.endings)), None)

    @classmethod
    def taking_path(cls, path: str) -> list[str]:
        """Returns the names of the classes to suggest if a user sets a field to a path instead of Name(path=...)."""
        if names := cls._siblings("path"):
            reader = cls.reader_of(os.path.expanduser(path))
            return [reader] if reader in names else ["TextFiles"] if "TextFiles" in names else names
        return []

    @classmethod
    def _siblings(cls, field: str) -> list[str]:
        """Returns the names of the alternative classes for this config field that define a field named `field`."""
        kind = next((c for c in cls.__mro__ if c.__module__ == "pretrainax.config.kinds"), None)
        names = kind.names() if kind else []
        return [name for name in names if field in _choices_by_name()[name].__dataclass_fields__]

    @classmethod
    def no_field(cls, path: str, field: str) -> str:
        """Returns the error message for a flag that sets a field that this class does not have.

        Args:
          path: path of the config field that contains an instance of this class: "config.data.source".
          field: name of the unknown field.
        """
        fields = cls.__dataclass_fields__
        line = f"{path} is {cls.__name__}, which has no field {field!r}"
        if others := cls._siblings(field):
            example = "TextFiles" if "TextFiles" in others else others[-1]
            return f'{line}; choices with this field: --{path}="{example}({field}=...)" ({", ".join(others)})'
        return f"{line}, {nearest(field, fields)}"

    @classmethod
    def names(cls) -> list[str]:
        """Returns the sorted names of all concrete subclasses of this class that are imported."""
        import_built_in()
        return sorted(name for name, choice in _choices_by_name().items() if issubclass(choice, cls))

    def __str__(self) -> str:
        """Returns the flag value for this instance, Name(field=value, ...), without fields that have their defaults."""
        given = ((f, getattr(self, f.name)) for f in constructor_fields(type(self)))
        fields = (f"{f.name}={format_value(value)}" for f, value in given if value != default_of(f))
        return f"{type(self).__name__}({', '.join(fields)})"

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        """Yields an error message for each invalid field: the value, the allowed values, and the field to set.

        experiment: the config that contains this instance.
        """
        yield from ()


def constructor_fields(cls: type) -> list[dataclasses.Field]:
    """Returns the fields of a dataclass in constructor order: keyword-only fields come last."""
    return sorted(dataclasses.fields(cls), key=lambda field: field.kw_only is True)


def default_of(field: dataclasses.Field) -> Any:
    """Returns the default value of a dataclass field, or dataclasses.MISSING for a required field."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def format_value(value: object) -> str:
    """Formats the value of a config field as in a flag: `(1, 2)`, `'auto'`, `AdamW(beta2=0.98)`."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(format_value, value))}{',' if len(value) == 1 else ''})"
    return str(value) if isinstance(value, Choice) else repr(value)


def _is_built_in(cls: type[Choice]) -> bool:
    return cls.__module__.startswith("pretrainax.")


def _is_complete(cls: type[Choice]) -> bool:
    """Returns True for concrete classes: dataclasses that define no abstract method."""
    is_abstract = any(getattr(member, "__isabstractmethod__", False) for member in vars(cls).values())
    return "__dataclass_fields__" in vars(cls) and not is_abstract


def import_built_in() -> None:
    """Imports all modules of this package that define choices, including their dependencies."""
    for module in BUILT_IN:
        importlib.import_module(module)  # registers its choices


def _choices_by_name() -> dict[str, type[Choice]]:
    classes = list(filter(_is_complete, Choice.imported()))
    classes.sort(key=_is_built_in)  # built-in classes win name conflicts
    return {cls.__name__: cls for cls in classes} | {cls.type_name(): cls for cls in classes}


def _import_entry_points(class_name: str) -> None:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=class_name):
        try:
            entry.load()
        except (ImportError, AttributeError) as e:
            raise UserError(f"entry point {entry.name} = {entry.value} cannot be imported ({e})") from e


def _choice(node: ast.expr, kind: type[Choice] = Choice) -> Choice:
    """Instantiates the choice that a name or a call describes.

    Raises:
      SyntaxError, ValueError: the node is neither a name nor a call.
    """
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args:
        raise SyntaxError
    values = {}
    for keyword in call.keywords:
        if keyword.arg is None:  # **
            raise SyntaxError
        values[keyword.arg] = _value(keyword.value)
    name = call.func.id
    cls = kind.named(name)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for field in values.keys() - fields:
        raise UserError(f"{name} has no field {field!r}, {nearest(field, fields)}")
    for field in fields.keys() - values:
        if fields[field].default is fields[field].default_factory is dataclasses.MISSING:
            raise UserError(f"{name} needs a value for {field!r}: write {name}({field}=...)")
    hints = typing.get_type_hints(cls, include_extras=True)
    for field, value in values.items():
        if not fits(value, hints[field]):
            raise UserError(type_error_line(f"{name}.{field}", value, hints[field]))
    return cls(**values)


def fits(value: object, hint: object) -> bool:
    """Returns True if a value matches the type annotation of a config field."""
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return value in kinds
    if origin is Annotated:  # a type and a literal such as 'auto'
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


def type_error_line(path: str, value: object, hint: object) -> str:
    """Returns the error message for a config field whose value has a wrong type.

    hint: type annotation of the field.
    """
    return f"{path} is {value!r}, it must be {format_type(hint)}"


def format_type(hint: object) -> str:
    """Formats a type annotation for errors: "of type int", "'stop' or 'skip'", "of kind Packing (FirstFit, …)"."""
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, kinds))
    if origin is Annotated:
        return " or ".join([format_type(kinds[0]), *map(repr, kinds[1:])])
    if origin in (typing.Union, types.UnionType):
        return " or ".join("None" if kind is type(None) else format_type(kind) for kind in kinds)
    if origin is tuple and kinds[-1] is ...:
        return f"a tuple, each {format_type(kinds[0])}"
    if isinstance(hint, type) and issubclass(hint, Choice):
        return f"of kind {hint.__name__} ({', '.join(hint.names())})"
    return f"of type {hint.__name__ if isinstance(hint, type) and not origin else hint}"


def _value(node: ast.expr) -> object:
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(map(_value, node.elts))
    return _choice(node) if isinstance(node, (ast.Call, ast.Name)) else ast.literal_eval(node)
