"""Fields that offer alternatives: a `Choice` is an object of the class that does the work, with its own fields."""

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


BUILT_IN = (  # the modules that have the choices of this package
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
ENTRY_POINTS = "pretrainax.choices"  # the group of those in which other packages name theirs


def free(default: object) -> Any:
    """Returns a field that may differ between a run and its resumption: no mathematics, or the answer to a fault."""
    return dataclasses.field(default=default, metadata={"free": True})


def later(default: object, is_free: bool = True) -> Any:
    """Returns a field, a free one, that config.json has only where it is given: files of runs without it stay as they
    were."""
    return dataclasses.field(default=default, metadata={"free": is_free, "later": True})


class Choice:
    """Base of the dataclasses that one field offers as alternatives. JSON names them by their class.

    A class of another package is a choice as soon as it is imported, as a config file does. To be found by its name
    alone, in a flag or the config.json of a run, it is an entry point of its package:

        [project.entry-points."pretrainax.choices"]
        MyOptimizer = "mypackage.optim:MyOptimizer"
    """

    _classes: ClassVar[dict[str, type["Choice"]]] = {}  # by module:name
    endings: ClassVar[tuple[str, ...]] = ()  # of the files that it reads
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]  # which each that can be chosen has

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Choice._classes[f"{cls.__module__}:{cls.__qualname__}"] = cls

    @staticmethod
    def imported() -> list[type["Choice"]]:
        """Returns all classes there are so far, abstract ones too."""
        return list(Choice._classes.values())

    @staticmethod
    def alternatives(kind: type["Choice"]) -> list[type["Choice"]]:
        """Returns the classes of this package that a field of a kind can hold."""
        import_built_in()
        return [cls for cls in Choice.imported() if issubclass(cls, kind) and _is_built_in(cls) and _is_complete(cls)]

    @classmethod
    def type_name(cls) -> str:
        """Returns what JSON calls the class: `AdamW`, or of another package `mypackage.optim:MyOptimizer`."""
        return cls.__name__ if _is_built_in(cls) else f"{cls.__module__}:{cls.__qualname__}"

    @classmethod
    def named(cls, name: str) -> type["Choice"]:
        """Returns the choice of this kind that `type_name` calls so, or whose class has this name; built-in ones first.

        A name may come from anybody's config.json, so it never decides what is imported: only the modules of this
        package are, and entry points of installed ones.

        Raises:
          UserError: there is none, with the nearest names.
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
                f"choice {name!r} is of another package, which is not imported: import {module} in the config file, or "
                f"install the package with the entry point {class_name} = {name} of the group {ENTRY_POINTS}"
            )
        kind = "choice" if cls is Choice else cls.__name__
        raise UserError(f"unknown {kind} {shortened(name)!r}, {nearest(name, (n for n in choices if ':' not in n))}")

    @classmethod
    def parse(cls, text: str) -> "Choice":
        """Reads `"TextFiles(path='my/books', valid_fraction=0.05)"`, as a flag gives it for a whole field.

        Values are literals, choices and tuples of them. Nothing is evaluated. Of the class of the field's value, an
        error can say what the field takes.
        """
        try:
            return _choice(ast.parse(text, mode="eval").body, cls)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deep
            error = UserError(f"cannot read {shortened(text)!r}; write Name or Name(field=value, ...)")
        except UserError as e:
            error = e
        if re.fullmatch(r"[^()]*[^()\w][^()]*|\w+", text) and (takers := cls.taking_path(text)):
            calls = " or ".join(f"{name}(path={text!r})" for name in takers)
            what = "is a folder" if os.path.isdir(os.path.expanduser(text)) else "is a file"
            if os.path.exists(os.path.expanduser(text)):
                error = UserError(f"{text!r} {what}: did you mean {calls}?")
            elif os.sep in text:
                error = UserError(f"{text!r} looks like a path, and nothing is there: did you mean {calls}?")
        raise error from None

    @classmethod
    def parse_several(cls, text: str) -> tuple:
        """Reads a tuple of choices as `parse` reads one: `"(Phase(share=0.9), Phase())"`; one alone is a tuple too."""
        try:
            node = ast.parse(text.strip(), mode="eval").body
            items = node.elts if isinstance(node, (ast.Tuple, ast.List)) else [node]
            return tuple(_choice(item, cls) for item in items)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise UserError(f"cannot read {shortened(text)!r}; write (Name(field=value, ...), ...)") from None

    @classmethod
    def reader_of(cls, path: str) -> Optional[str]:
        """Returns the name of the choice that reads files of such a name, or those in such a folder.

        The class of one says so by its `endings`; None: none does.
        """
        names = [path]
        if os.path.isdir(path):
            names = sorted(name for _, _, names in itertools.islice(os.walk(path), 100) for name in names)
        kinds = [kind for kind in _choices_by_name().values() if kind.endings]
        return next((kind.__name__ for name in names for kind in kinds if name.endswith(kind.endings)), None)

    @classmethod
    def taking_path(cls, path: str) -> list[str]:
        """Returns the names of the choices that could be meant where a field of this class is given a path alone."""
        if found := cls._siblings("path"):
            reader = cls.reader_of(os.path.expanduser(path))
            return [reader] if reader in found else ["TextFiles"] if "TextFiles" in found else found
        return []

    @classmethod
    def _siblings(cls, field: str) -> list[str]:
        """Returns the names of the choices for the same field of a config that have a field of this name."""
        kind = next((c for c in cls.__mro__ if c.__module__ == "pretrainax.config.kinds"), None)
        names = kind.names() if kind else []
        return [name for name in names if field in _choices_by_name()[name].__dataclass_fields__]

    @classmethod
    def no_field(cls, path: str, field: str) -> str:
        """Writes the error line of a flag for a field that the class of a choice at `path` does not have."""
        own = cls.__dataclass_fields__
        line = f"{path} is {cls.__name__}, which has no field {field!r}"
        if others := cls._siblings(field):
            plain = "TextFiles" if "TextFiles" in others else others[-1]
            return f'{line}; give one that has, as --{path}="{plain}({field}=...)" ({", ".join(others)})'
        return f"{line}, {nearest(field, own)}"

    @classmethod
    def names(cls) -> list[str]:
        """Returns the names of what can be chosen of this kind, sorted."""
        import_built_in()
        return sorted(name for name, choice in _choices_by_name().items() if issubclass(choice, cls))

    def __str__(self) -> str:
        """Returns what a flag takes for it, without the fields that are as by default."""
        given = ((f, getattr(self, f.name)) for f in in_order(type(self)))
        fields = (f"{f.name}={written(value)}" for f, value in given if value != default_of(f))
        return f"{type(self).__name__}({', '.join(fields)})"

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        """Yields a line for each thing that cannot work: value got, what is allowed, field to set."""
        yield from ()


def in_order(cls: type) -> list[dataclasses.Field]:
    """Returns the fields of a dataclass as a call has them: those that are given by name alone come last."""
    return sorted(dataclasses.fields(cls), key=lambda field: field.kw_only is True)


def default_of(field: dataclasses.Field) -> Any:
    """Returns what a field holds where nothing is given; MISSING where something must be."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def written(value: object) -> str:
    """Returns a value as it is written within a choice in a flag."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(written, value))}{',' if len(value) == 1 else ''})"
    return str(value) if isinstance(value, Choice) else repr(value)


def _is_built_in(cls: type[Choice]) -> bool:
    return cls.__module__.startswith("pretrainax.")


def _is_complete(cls: type[Choice]) -> bool:
    """Tells a class that can be chosen from a base: it is a dataclass, and leaves no method of its own open."""
    left_open = any(getattr(member, "__isabstractmethod__", False) for member in vars(cls).values())
    return "__dataclass_fields__" in vars(cls) and not left_open


def import_built_in() -> None:
    """Imports all modules of this package that define choices, and the parts that those need."""
    for module in BUILT_IN:
        importlib.import_module(module)  # which registers its choices


def _choices_by_name() -> dict[str, type[Choice]]:
    classes = list(filter(_is_complete, Choice.imported()))
    classes.sort(key=_is_built_in)  # so that they win where two have the same name
    return {cls.__name__: cls for cls in classes} | {cls.type_name(): cls for cls in classes}


def _import_entry_points(class_name: str) -> None:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=class_name):
        try:
            entry.load()
        except (ImportError, AttributeError) as e:
            raise UserError(f"entry point {entry.name} = {entry.value} cannot be imported ({e})") from e


def _choice(node: ast.expr, kind: type[Choice] = Choice) -> Choice:
    """Makes the choice, of this kind, of a name or a call; SyntaxError or ValueError where it is neither."""
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
            raise UserError(misfit(f"{name}.{field}", value, hints[field]))
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


def misfit(path: str, value: object, hint: object) -> str:
    """Writes the error line of a value that does not fit its field."""
    return f"{path} is {value!r}, it must be {spelled(hint)}"


def spelled(hint: object) -> str:
    """Returns a type as error lines have it: "of type int", "'stop' or 'skip'", "of kind Packing (FirstFit, …)"."""
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, kinds))
    if origin is Annotated:
        return " or ".join([spelled(kinds[0]), *map(repr, kinds[1:])])
    if origin in (typing.Union, types.UnionType):
        return " or ".join("None" if kind is type(None) else spelled(kind) for kind in kinds)
    if origin is tuple and kinds[-1] is ...:
        return f"a tuple, each {spelled(kinds[0])}"
    if isinstance(hint, type) and issubclass(hint, Choice):
        return f"of kind {hint.__name__} ({', '.join(hint.names())})"
    return f"of type {hint.__name__ if isinstance(hint, type) and not origin else hint}"


def _value(node: ast.expr) -> object:
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(map(_value, node.elts))
    return _choice(node) if isinstance(node, (ast.Call, ast.Name)) else ast.literal_eval(node)
