"""Describes the fields of configs, for the page docs/config.md and for the --help of one config."""

import dataclasses
import re
import textwrap
from collections.abc import Iterator

from pretrainax.config import Choice, Experiment
from pretrainax.config.choice import format_value
from pretrainax.config.reference import FieldReference, fields_of, first_sentence
from pretrainax.reporting.tables import markdown

_INTRODUCTION = """\
# Every field of a config

`configs/NAME.py` builds an `Experiment`, and a flag sets one of its fields: `--config.train.steps=1000`. If the type of
a field is a link, the field holds an object of one of the linked classes. A flag sets the whole object or one field:

```
--config.objective="SpanCorruption(noise_density=0.3)"
--config.objective.noise_density=0.3
```

`python -m pretrainax.main --config=FILE --help` shows the values of a config. A field without a default is required,
and the configs set it. The mark ↻ means that the field may change when a run resumes. `python docs/reference.py`
generates this page from the comments next to the fields.
"""
_LEGEND = (
    "The fields of this config, as flags with their values. Below each flag: type, default and meaning. A line that "
    'starts with "or" shows another class for the field, with the fields of that class.'
)
_OTHER_CLASSES = (
    'To show the fields of another class, select it, as in --config.optimizer="Lamb()" --help. docs/config.md in the '
    "repository lists the fields of all classes."
)


def page() -> str:
    """Returns the content of docs/config.md, as Markdown."""
    sections = dict(_sections(Experiment, "config"))
    parts = [_INTRODUCTION, *(_section(f"`{path}`", cls) for path, cls in sections.items())]
    for kind in _kinds():
        classes = _classes(kind)
        if [cls.__name__ for cls in classes] == [kind.__name__]:
            parts.append(_section(kind.__name__, classes[0]))
        else:
            parts.append(f"## {kind.__name__}\n\n{_prose(first_sentence(kind.__doc__))}.\n")
            parts += [_section(cls.__name__, cls, "###") for cls in classes]
    return "\n".join(parts)


def format_config(experiment: Experiment, width: int) -> str:
    """Returns a text with all fields of one config and their values, for a terminal with `width` columns."""
    legend, others = textwrap.wrap(_LEGEND, width), textwrap.wrap(_OTHER_CLASSES, width)
    return "\n".join([*legend, *_values(experiment, "config", width), "", *others])


def _sections(cls: type, path: str) -> Iterator[tuple[str, type]]:
    """Yields (path, class) of `cls` and of the parts that every config has, such as ("config.train", TrainConfig)."""
    yield path, cls
    for field in fields_of(cls):
        if _is_part(field):
            yield from _sections(field.kinds[0], f"{path}.{field.name}")


def _is_part(field: FieldReference) -> bool:
    return len(field.kinds) == 1 and field.hint == field.kinds[0].__name__ and not issubclass(field.kinds[0], Choice)


def _kinds() -> list[type]:
    """Returns the base classes of the objects that fields can hold, in the order of the fields."""
    kinds, waiting = [], [cls for _, cls in _sections(Experiment, "config")]
    while waiting:
        for field in fields_of(waiting.pop(0)):
            new = [kind for kind in field.kinds if kind not in kinds and not _is_part(field)]
            kinds += new
            waiting += [cls for kind in new for cls in _classes(kind)]
    return [kind for kind in kinds if not any(issubclass(kind, other) for other in kinds if other is not kind)]


def _classes(kind: type) -> list[type]:
    return sorted(Choice.alternatives(kind), key=lambda cls: cls.__name__) if issubclass(kind, Choice) else [kind]


# --- Markdown ------------------------------------------------------------------------------------------------------


def _section(title: str, cls: type, level: str = "##") -> str:
    rows = [
        (
            f"`{field.name}`{' ↻' if field.free else ''}",
            _type(field),
            "" if field.default is None or _is_part(field) else _code(field.default),
            _prose(field.meaning),
        )
        for field in fields_of(cls)
    ]
    table = f"\n{markdown(('field', 'type', 'default', 'meaning'), rows, padded=False)}" if rows else ""
    return f"{level} {title}\n\n{_prose(first_sentence(cls.__doc__))}.\n{table}"


def _type(field: FieldReference) -> str:
    """Returns the type of a field as Markdown; the name of a class is a link to the section of that class."""
    if not field.kinds:
        return _code(field.hint)
    names = {kind.__name__: _anchor(kind, _is_part(field), field.name) for kind in field.kinds}
    parts = re.split(rf"\b({'|'.join(names)})\b", field.hint)
    linked = (f"[{part}]({names[part]})" if part in names else _escaped(part) for part in parts)
    return "".join(linked)


def _anchor(kind: type, is_part: bool, name: str) -> str:
    return f"#config{name}" if is_part else f"#{kind.__name__.lower()}"


def _code(value: str) -> str:
    return f"`{value}`".replace("|", "\\|")


def _prose(comment: str) -> str:
    """Returns a comment or a docstring as Markdown, without escapes in code spans."""
    return "".join(
        _code(part[1:-1]) if part.startswith("`") else _escaped(part) for part in re.split(r"(`[^`]+`)", comment)
    )


def _escaped(plain: str) -> str:
    return re.sub(r"([\\|<*[])", r"\\\1", plain)


# --- a terminal ----------------------------------------------------------------------------------------------------


def _values(node: object, path: str, width: int) -> Iterator[str]:
    """Yields the lines for all fields of `node`, a part of a config, and of the objects in these fields.

    Further lines show the other classes that a field can hold.
    """
    for field in fields_of(type(node)):
        value, where = getattr(node, field.name), f"{path}.{field.name}"
        if _is_part(field):
            yield f"\n{where}: {first_sentence(type(value).__doc__)}"
            yield from _values(value, where, width)
            continue
        whole = dataclasses.is_dataclass(value) or isinstance(value, tuple)
        yield f'  --{where}="{format_value(value)}"' if whole else f"  --{where}={value}"
        default = "" if field.default is None else f", by default {field.default}"
        yield from _wrapped(f"{field.hint}{default}: {field.meaning}", width)
        for other in (cls for kind in field.kinds for cls in _classes(kind) if cls is not type(value)):
            yield from _wrapped(f"or {_signature(other)}: {first_sentence(other.__doc__)}", width)
        if dataclasses.is_dataclass(value):
            yield from _values(value, where, width)


def _signature(cls: type) -> str:
    return f"{cls.__name__}({', '.join(field.name for field in fields_of(cls))})"


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, initial_indent=" " * 6, subsequent_indent=" " * 8, break_long_words=False)
