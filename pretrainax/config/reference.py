"""Describes the fields of a config: type, default, and the meaning, which is the comment beside the field."""

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

from pretrainax.config.choice import Choice, default_of, in_order, written


class FieldReference(NamedTuple):
    """A field as people read of it."""

    name: str
    hint: str  # its type: int | None
    kinds: list[type]  # the dataclasses that the type names
    default: Optional[str]  # None: a value must be given
    meaning: str
    free: bool  # may differ between a run and its resumption


def fields_of(cls: type) -> list[FieldReference]:
    """Returns the fields of a dataclass, in the order of its calls."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = []
    for field in in_order(cls):
        default, hint = default_of(field), hints[field.name]
        found.append(
            FieldReference(
                field.name,
                type_text(hint),
                list(_dataclasses_in(hint)),
                None if default is dataclasses.MISSING else written(default),
                next((meaning for base in cls.__mro__ if (meaning := _comments(base).get(field.name))), ""),
                bool(field.metadata.get("free")),
            )
        )
    return found


def type_text(hint: object) -> str:
    """Returns a type as it is written in a config: `'layer' | 'rms'`, `int | None`, `tuple[float, ...]`."""
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
    """Returns the docstring of a Python file, which is not run."""
    with open(file, "rb") as f:  # in the encoding that it declares
        return ast.get_docstring(ast.parse(f.read())) or ""


def first_sentence(docstring: Optional[str]) -> str:
    """Returns that of a docstring in one line, without its full stop."""
    paragraph = " ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split())
    return re.split(r"(?<!\.)(?<! al)\. ", paragraph)[0].removesuffix(".")


def _dataclasses_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, Choice)):
        yield hint
    for part in typing.get_args(hint):
        yield from _dataclasses_in(part)


@functools.cache
def _comments(cls: type) -> dict[str, str]:
    """Returns the comments beside the fields in the body of a class: those in the lines above, and in their own."""
    if not dataclasses.is_dataclass(cls):
        return {}
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # a class without a file
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    lines = source.splitlines()
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    found = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            own = [comments[n] for n in range(first, (node.end_lineno or first) + 1) if n in comments]
            found[node.target.id] = " ".join(own)
    return found
