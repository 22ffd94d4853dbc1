"""Describes the fields of config dataclasses, taking each description from the source comment next to the field."""

import ast
import dataclasses
import functools
import inspect
import io
import os
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator
from typing import NamedTuple, Optional

from pretrainax.config.choice import Choice, constructor_fields, default_of, format_value

_FOR_TOOLS = re.compile(r"\s*#\s*(pyright:|type: ignore|fmt:|noqa).*")  # comments for type checkers and linters


class FieldReference(NamedTuple):
    """Describes one field of a config dataclass."""

    name: str
    hint: str  # formatted type: int | None
    kinds: list[type]  # dataclasses and subclasses of Choice that occur in the type annotation
    default: Optional[str]  # formatted default; None: the field is required
    meaning: str  # comment next to the field in the source code; "": no comment
    free: bool  # True if a resumed run may change the field


def fields_of(cls: type) -> list[FieldReference]:
    """Describes the fields of a dataclass, in constructor order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    references = []
    for field in constructor_fields(cls):
        default, hint = default_of(field), hints[field.name]
        references.append(
            FieldReference(
                field.name,
                type_text(hint),
                list(_dataclasses_in(hint)),
                None if default is dataclasses.MISSING else format_value(default),
                next((meaning for base in cls.__mro__ if (meaning := _comments(base).get(field.name))), ""),
                bool(field.metadata.get("free")),
            )
        )
    return references


def type_text(hint: object) -> str:
    """Formats a type annotation for users: `'layer' | 'rms'`, `int | None`, `tuple[float, ...]`."""
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(map(repr, kinds))
    if origin is typing.Annotated:
        return " | ".join([type_text(kinds[0]), *map(repr, kinds[1:])])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(type_text, kinds))
    if origin is tuple:
        return f"tuple[{', '.join(map(type_text, kinds))}]"
    if hint is ... or hint is type(None):
        return "..." if hint is ... else "None"
    return getattr(hint, "__name__", str(hint))


def docstring_of(file: str | os.PathLike) -> str:
    """Reads the docstring of a Python file without executing the file; returns "" if there is no docstring."""
    with open(file, "rb") as f:  # ast reads the declared encoding
        return ast.get_docstring(ast.parse(f.read())) or ""


def first_sentence(docstring: Optional[str]) -> str:
    """Returns the first sentence of a docstring on one line, without its period."""
    paragraph = " ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split())
    return re.split(r"(?<!\.)(?<! al)\. ", paragraph)[0].removesuffix(".")


def _dataclasses_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, Choice)):
        yield hint
    for argument in typing.get_args(hint):
        yield from _dataclasses_in(argument)


@functools.cache
def _comments(cls: type) -> dict[str, str]:
    """Reads the comments on a dataclass's fields from its source code; returns {field name: comment}.

    A field's comment consists of the comment lines directly above the field and the comments on its own lines. Omits
    inherited fields. Returns {} for other classes and for classes without source code.
    """
    if not dataclasses.is_dataclass(cls):
        return {}
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # a class without a source file
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comment_lines = {
        t.start[0]: _FOR_TOOLS.sub("", t.string).lstrip("# ") for t in tokens if t.type == tokenize.COMMENT
    }
    comments = {line: text for line, text in comment_lines.items() if text}
    lines = source.splitlines()
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    comments_of = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            field_lines = [comments[n] for n in range(first, (node.end_lineno or first) + 1) if n in comments]
            comments_of[node.target.id] = " ".join(field_lines)
    return comments_of
