"""Describes config fields, for the page docs/config.md and for the --help text of a single config."""

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
    """Generates the content of docs/config.md, as Markdown."""
    sections = dict(_sections(Experiment, "config"))
    blocks = [_INTRODUCTION, *(_section(f"`{path}`", cls) for path, cls in sections.items())]
    for base in _kinds():
        classes = _classes(base)
        if [cls.__name__ for cls in classes] == [base.__name__]:
            blocks.append(_section(base.__name__, classes[0]))
        else:
            blocks.append(f"## {base.__name__}\n\n{_prose(first_sentence(base.__doc__))}.\n")
            blocks += [_section(cls.__name__, cls, "###") for cls in classes]
    return "\n".join(blocks)


def format_config(experiment: Experiment, width: int) -> str:
    """Formats all fields of one config with their values, for a terminal with `width` columns."""
    legend, others = textwrap.wrap(_LEGEND, width), textwrap.wrap(_OTHER_CLASSES, width)
    return "\n".join([*legend, *_values(experiment, "config", width), "", *others])


def _sections(cls: type, path: str) -> Iterator[tuple[str, type]]:
    """Yields (path, class) for `cls` and for all nested config sections, such as ("config.train", TrainConfig)."""
    yield path, cls
    for field in fields_of(cls):
        if _is_section(field):
            yield from _sections(field.kinds[0], f"{path}.{field.name}")


def _is_section(field: FieldReference) -> bool:
    """Checks whether a field holds a config section: an object of one fixed class that is not a `Choice`."""
    return len(field.kinds) == 1 and field.hint == field.kinds[0].__name__ and not issubclass(field.kinds[0], Choice)


def _kinds() -> list[type]:
    """Returns the base classes of the objects that config fields can hold (optimizers, for example), in field order."""
    kinds, queue = [], [cls for _, cls in _sections(Experiment, "config")]
    while queue:
        for field in fields_of(queue.pop(0)):
            new_kinds = [kind for kind in field.kinds if kind not in kinds and not _is_section(field)]
            kinds += new_kinds
            queue += [cls for kind in new_kinds for cls in _classes(kind)]
    return [kind for kind in kinds if not any(issubclass(kind, other) for other in kinds if other is not kind)]


def _classes(kind: type) -> list[type]:
    """Returns the classes that a field of type `kind` can hold, sorted by name."""
    return sorted(Choice.alternatives(kind), key=lambda cls: cls.__name__) if issubclass(kind, Choice) else [kind]


# --- Markdown ------------------------------------------------------------------------------------------------------


def _section(title: str, cls: type, level: str = "##") -> str:
    """Formats one section of the page as Markdown: a title, the class's description and a table of its fields."""
    rows = [
        (
            f"`{field.name}`{' ↻' if field.free else ''}",
            _type(field),
            "" if field.default is None or _is_section(field) else _code(field.default),
            _prose(field.meaning),
        )
        for field in fields_of(cls)
    ]
    table = f"\n{markdown(('field', 'type', 'default', 'meaning'), rows, padded=False)}" if rows else ""
    return f"{level} {title}\n\n{_prose(first_sentence(cls.__doc__))}.\n{table}"


def _type(field: FieldReference) -> str:
    """Formats a field's type as Markdown, in which class names link to the sections about these classes."""
    if not field.kinds:
        return _code(field.hint)
    anchors = {kind.__name__: _anchor(kind, _is_section(field), field.name) for kind in field.kinds}
    tokens = re.split(rf"\b({'|'.join(anchors)})\b", field.hint)
    links = (f"[{token}]({anchors[token]})" if token in anchors else _escape_markdown(token) for token in tokens)
    return "".join(links)


def _anchor(kind: type, is_part: bool, name: str) -> str:
    return f"#config{name}" if is_part else f"#{kind.__name__.lower()}"


def _code(value: str) -> str:
    return f"`{value}`".replace("|", "\\|")


def _prose(comment: str) -> str:
    """Converts a comment or a docstring to Markdown: escapes special characters, except in code spans."""
    return "".join(
        _code(part[1:-1]) if part.startswith("`") else _escape_markdown(part)
        for part in re.split(r"(`[^`]+`)", comment)
    )


def _escape_markdown(plain: str) -> str:
    return re.sub(r"([\\|<*[])", r"\\\1", plain)


# --- a terminal ----------------------------------------------------------------------------------------------------


def _values(node: object, path: str, width: int) -> Iterator[str]:
    """Yields lines for all fields of the config section `node`, including the fields of nested objects.

    Additional lines show the alternative classes that a field can hold.
    """
    for field in fields_of(type(node)):
        value, field_path = getattr(node, field.name), f"{path}.{field.name}"
        if _is_section(field):
            yield f"\n{field_path}: {first_sentence(type(value).__doc__)}"
            yield from _values(value, field_path, width)
            continue
        is_object = dataclasses.is_dataclass(value) or isinstance(value, tuple)
        yield f'  --{field_path}="{format_value(value)}"' if is_object else f"  --{field_path}={value}"
        default = "" if field.default is None else f", by default {field.default}"
        yield from _wrap(f"{field.hint}{default}: {field.meaning}", width)
        for other in (cls for kind in field.kinds for cls in _classes(kind) if cls is not type(value)):
            yield from _wrap(f"or {_signature(other)}: {first_sentence(other.__doc__)}", width)
        if dataclasses.is_dataclass(value):
            yield from _values(value, field_path, width)


def _signature(cls: type) -> str:
    return f"{cls.__name__}({', '.join(field.name for field in fields_of(cls))})"


def _wrap(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, initial_indent=" " * 6, subsequent_indent=" " * 8, break_long_words=False)
