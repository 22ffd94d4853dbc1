"""Implements config fields with alternatives: the value is a `Choice`, an instance of one of several dataclasses."""

import ast
import dataclasses
import importlib
import importlib.metadata
import itertools
import os
import re
import types
import typing
from collections.abc import Callable, Iterator
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
CONFIG_MODULE = "config_config"  # module name of config files; their own choices have this prefix in config.json
# The first letters of the words in a class name, and whole abbreviations: M and LM of MaskedLM
_INITIALS = re.compile(r"[A-Z](?=[a-z])|[A-Z0-9]+(?![a-z])")


def resumable_field(default: object) -> Any:
    """Defines a dataclass field that a resumed run may change.

    The field either does not affect the numerical results of the run, or configures fault handling.
    """
    return dataclasses.field(default=default, metadata={"free": True})


def optional_in_json(default: object, is_free: bool = True) -> Any:
    """Defines a dataclass field that config.json omits if it has its default value.

    A new version of PretrainAX can thus add the field without changing the config.json of runs that do not use it.

    Args:
      is_free: whether a resumed run may change the field, as with `resumable_field`.
    """
    return dataclasses.field(default=default, metadata={"free": is_free, "later": True})


class Choice:
    """Base class of the dataclasses that are alternatives for a config field; JSON stores the class name.

    A class from another package is available once it has been imported, for example by a config file. A flag or a run's
    config.json can also name a class that has not been imported yet if its package defines an entry point:

        [project.entry-points."pretrainax.choices"]
        MyOptimizer = "mypackage.optim:MyOptimizer"
    """

    _classes: ClassVar[dict[str, type["Choice"]]] = {}  # all imported subclasses, by "module:name"
    endings: ClassVar[tuple[str, ...]] = ()  # suffixes (".txt") of the files that the class reads; (): no files
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
        """Returns the built-in concrete subclasses of `kind`, i.e. the alternatives for a config field of that type."""
        import_built_in()
        return [cls for cls in Choice.imported() if issubclass(cls, kind) and _is_built_in(cls) and _is_complete(cls)]

    @classmethod
    def type_name(cls) -> str:
        """Returns the class name used in JSON: `AdamW`, or `mypackage.optim:MyOptimizer` for other packages."""
        return cls.__name__ if _is_built_in(cls) else f"{cls.__module__}:{cls.__qualname__}"

    @classmethod
    def named(cls, name: str) -> type["Choice"]:
        """Resolves a `type_name` or class name to a concrete subclass of this class.

        Classes in this package take precedence. Because the name can come from an untrusted config.json, it never
        selects a module to import: only modules in this package and entry points of installed packages are imported.

        Raises:
          UserError: no subclass has this name; the message suggests the most similar names.
        """
        import_built_in()
        if name not in _choices_by_name():
            _import_entry_points(name.rpartition(":")[2])
        choices = {n: choice for n, choice in _choices_by_name().items() if issubclass(choice, cls)}
        if name in choices:
            return choices[name]
        module, _, class_name = name.rpartition(":")
        if module in ("__main__", CONFIG_MODULE):
            raise UserError(
                f"choice {name!r} was defined in a script or config file, and only this file can load it: move the "
                f"class to a package with the entry point {class_name} = MODULE:{class_name} in the group "
                f"{ENTRY_POINTS}, and replace {name!r} in config.json by MODULE:{class_name}"
            )
        if module:
            raise UserError(
                f"choice {name!r} belongs to a package that is not imported: import {module} in the config file, or "
                f"install the package with the entry point {class_name} = {name} in the group {ENTRY_POINTS}"
            )
        kind = "choice" if cls is Choice else cls.__name__
        raise UserError(f"unknown {kind} {shortened(name)!r}, {_hint(name, [n for n in choices if ':' not in n])}")

    @classmethod
    def parse(cls, text: str) -> "Choice":
        """Parses a flag value, for example `"TextFiles(path='my/books', valid_fraction=0.05)"`.

        The field values are literals, nested instances of Choice, and tuples of these. No code is executed. Call this
        method on the config field's type, so that errors can suggest alternatives.

        Raises:
          UserError: the syntax or a field is invalid, or the class does not exist or is not valid for the field.
        """
        try:
            return _choice(ast.parse(text, mode="eval").body, cls)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: too deeply nested
            error = UserError(f"cannot read {shortened(text)!r}; write Name or Name(field=value, ...), text in quotes")
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
        """Parses a tuple of instances, `"(Phase(share=0.9), Phase())"`, or one instance as a tuple with one item."""
        try:
            node = ast.parse(text.strip(), mode="eval").body
            items = node.elts if isinstance(node, (ast.Tuple, ast.List)) else [node]
            return tuple(_choice(item, cls) for item in items)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise UserError(f"cannot read {shortened(text)!r}; write (Name(field=value, ...), ...)") from None

    @classmethod
    def reader_of(cls, path: str) -> Optional[str]:
        """Returns the name of the class that reads a file, or None; compares suffixes with `endings`, ignoring case.

        Args:
          path: a file or folder. In a folder, the first file (by name) that some class reads determines the class.
        """
        names = [path]
        if os.path.isdir(path):
            names = sorted(name for _, _, names in itertools.islice(os.walk(path), 100) for name in names)
        kinds = [kind for kind in _choices_by_name().values() if kind.endings]
        return next((kind.__name__ for name in names for kind in kinds if name.lower().endswith(kind.endings)), None)

    @classmethod
    def taking_path(cls, path: str) -> list[str]:
        """Returns the class names to suggest when a user sets a config field to a path instead of Name(path=...)."""
        if names := cls._alternatives_with_field("path"):
            reader = cls.reader_of(os.path.expanduser(path))
            return [reader] if reader in names else ["TextFiles"] if "TextFiles" in names else names
        return []

    @classmethod
    def _alternatives_with_field(cls, field: str) -> list[str]:
        """Returns the names of the alternatives to this class that define a field named `field`."""
        kind = next((c for c in cls.__mro__ if c.__module__ == "pretrainax.config.kinds"), None)
        names = kind.names() if kind else []
        return [name for name in names if field in field_names(_choices_by_name()[name])]

    @classmethod
    def no_field(cls, path: str, field: str) -> str:
        """Formats the error message for a flag that sets an unknown field of this class.

        Args:
          path: path of the config field whose value is an instance of this class, for example "config.data.source".
          field: name of the unknown field.
        """
        line = f"{path} is {cls.__name__}, which has no field {field!r}"
        if others := cls._alternatives_with_field(field):
            example = "TextFiles" if "TextFiles" in others else others[-1]
            return f'{line}; choices with this field: --{path}="{example}({field}=...)" ({", ".join(others)})'
        return f"{line}, {nearest(field, field_names(cls))}"

    @classmethod
    def names(cls) -> list[str]:
        """Returns the sorted names of all imported concrete subclasses of this class."""
        import_built_in()
        return sorted(name for name, choice in _choices_by_name().items() if issubclass(choice, cls))

    def __str__(self) -> str:
        """Formats this instance as a flag value, Name(field=value, ...), omitting fields with default values."""
        values = ((f, getattr(self, f.name)) for f in constructor_fields(type(self)))
        fields = (f"{f.name}={format_value(value)}" for f, value in values if value != default_of(f))
        return f"{type(self).__name__}({', '.join(fields)})"

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        """Yields an error message for each invalid field, with the value and the allowed values.

        Args:
          experiment: the config that contains this instance.
        """
        yield from ()


def field_names(config: object) -> list[str]:
    """Returns the field names of a dataclass or its instance, without class variables; [] for any other value."""
    return [field.name for field in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []


def constructor_fields(cls: type) -> list[dataclasses.Field]:
    """Returns a dataclass's fields in constructor order, i.e. with keyword-only fields last."""
    return sorted(dataclasses.fields(cls), key=lambda field: field.kw_only is True)


def default_of(field: dataclasses.Field) -> Any:
    """Returns the default value of a dataclass field, or dataclasses.MISSING for a required field."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def format_value(value: object) -> str:
    """Formats a config value as it would be written in a flag: `(1, 2)`, `'auto'`, `AdamW(b2=0.98)`."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(format_value, value))}{',' if len(value) == 1 else ''})"
    return str(value) if isinstance(value, Choice) else repr(value)


def _is_built_in(cls: type[Choice]) -> bool:
    return cls.__module__.startswith("pretrainax.")


def is_importable(type_name: str) -> bool:
    """Returns True if every process finds the class with this `type_name`: it is built in or an entry point."""
    module, _, class_name = type_name.rpartition(":")
    entries = importlib.metadata.entry_points(group=ENTRY_POINTS, name=class_name)
    return not module or any(entry.value == type_name for entry in entries)


def _is_complete(cls: type[Choice]) -> bool:
    """Returns True if the class is concrete, i.e. a dataclass without abstract methods."""
    is_abstract = any(getattr(member, "__isabstractmethod__", False) for member in vars(cls).values())
    return "__dataclass_fields__" in vars(cls) and not is_abstract


def import_built_in() -> None:
    """Imports all modules in this package that define subclasses of Choice, along with their dependencies."""
    for module in BUILT_IN:
        importlib.import_module(module)  # registers its choices


def _choices_by_name() -> dict[str, type[Choice]]:
    classes = list(filter(_is_complete, Choice.imported()))
    classes.sort(key=_is_built_in)  # built-in classes win name conflicts
    return {cls.__name__: cls for cls in classes} | {cls.type_name(): cls for cls in classes}


def _hint(text: str, names: list[str]) -> str:
    """Formats a hint for an unknown class name: classes that `text` may abbreviate, or else `nearest` names.

    MLM and mlm suggest MaskedLM, adam_w and Adam suggest AdamW, LM suggests all classes whose names end in LM, and FIM
    suggests FillInTheMiddle.
    """
    typed = re.sub(r"[^a-z0-9]", "", text.lower())
    initials = {name: "".join(_INITIALS.findall(name)).lower() for name in names}
    in_order = re.compile(".*".join(typed))
    tests: tuple[Callable[[str], bool], ...] = (
        lambda name: name.lower() == typed,
        lambda name: initials[name] == typed,
        lambda name: name.lower().startswith(typed) or name.lower().endswith(typed),
        lambda name: initials[name][:1] == typed[0] and bool(in_order.search(initials[name])),
    )
    for test in tests if len(typed) > 1 else ():
        if similar := sorted(filter(test, names)):
            return f"did you mean {' or '.join(map(repr, similar))}?"
    return nearest(text, names)


def _import_entry_points(class_name: str) -> None:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=class_name):
        try:
            entry.load()
        except (ImportError, AttributeError) as e:
            raise UserError(f"entry point {entry.name} = {entry.value} cannot be imported ({e})") from e


def _choice(node: ast.expr, kind: type[Choice] = Choice) -> Choice:
    """Instantiates the subclass of `kind` that a parsed name or call (`AdamW(b2=0.98)`) describes.

    Raises:
      SyntaxError, ValueError: the node is neither a name nor a call, or a value is not a literal.
      UserError: no subclass of `kind` has this name, or a field is unknown, missing or of the wrong type.
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
    if origin is Annotated:  # a type and literals, for example 'auto'
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
    """Formats the error message for a config field whose value has the wrong type.

    Args:
      hint: type annotation of the field.
    """
    example = f", such as {(value,)}" if fits((value,), hint) else ""  # ('x') is not a tuple in Python
    return f"{path} is {value!r}, it must be {format_type(hint)}{example}"


def format_type(hint: object) -> str:
    """Formats a type annotation for error messages: "of type int", "'stop' or 'skip'", "of kind Packing (…)"."""
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
    if isinstance(node, ast.Name):
        try:
            Choice.named(node.id)
        except UserError as e:
            advice = f"write {node.id!r} if it is text (True, False and None begin with a capital letter)"
            raise UserError(f"{node.id} has no quotes: {advice}; {str(e).partition(', allowed: ')[0]}") from e
    return _choice(node) if isinstance(node, (ast.Call, ast.Name)) else ast.literal_eval(node)
