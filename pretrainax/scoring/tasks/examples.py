"""Reads the examples of a task: JSON lines as somebody published them, each with its file and line."""

import dataclasses
import glob
import os
import re
from collections.abc import Mapping, Sequence

from pretrainax.config import UserError, nearest
from pretrainax.data.files import opened, with_archives
from pretrainax.data.sources.records import json_object

ENDINGS = with_archives(".jsonl")
_FIELD = re.compile(r"\{(\w+)\}")  # in a template


@dataclasses.dataclass(frozen=True)
class Example:
    """A record of a file of examples. Whatever a task asks of it in vain is a UserError that begins with `place`."""

    place: str  # "grammar.jsonl:3", from 1
    fields: Mapping[str, object]

    def get(self, name: str) -> object:
        """Returns the value of a field."""
        if name not in self.fields:
            raise self.error(f"no field {name!r}, {nearest(name, self.fields)}")
        return self.fields[name]

    def fill(self, template: str) -> str:
        """Returns the template with the text of a field in place of each {field}; numbers are written as text."""
        return _FIELD.sub(lambda match: self._text(match[1]), template)

    def error(self, problem: str) -> UserError:
        return UserError(f"{self.place}: {problem}")

    def _text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise self.error(f"field {name!r} is {value!r}, it must be a text or a number")
        return str(value)


def read_examples(paths: Sequence[str]) -> list[Example]:
    """Returns the examples of files of JSON lines; UserError with file and line where one is no JSON object."""
    examples = []
    for path in paths:
        with opened(path) as f:
            for number, line in enumerate(f, 1):
                if line.isspace():
                    continue
                place = f"{path}:{number}"
                try:
                    examples.append(Example(place, json_object(line)))
                except (ValueError, RecursionError) as e:
                    raise UserError(f"{place}: {e}") from e
    if not examples:
        raise UserError(f"{', '.join(paths)} holds no example: give a file of JSON lines that has some")
    return examples


def find(path: str) -> list[str]:
    """Returns the sorted files of a file, a folder (each .jsonl below it) or a glob; UserError where there is none."""
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        below = glob.glob(os.path.join(glob.escape(path), "**", "*"), recursive=True)
        found = [file for file in below if file.endswith(ENDINGS)]
    else:
        found = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
    if not found:
        raise UserError(f"{path!r} is no file, no folder with .jsonl files and no pattern (*.jsonl) of such")
    return sorted(found)
