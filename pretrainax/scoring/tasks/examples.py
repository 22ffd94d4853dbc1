"""Reads the examples of a task from JSON lines in their published format, with file and line."""

import dataclasses
import glob
import os
import re
from collections.abc import Mapping, Sequence

from pretrainax.config import UserError, nearest
from pretrainax.data.files import open_decompressed, with_archives
from pretrainax.data.sources.records import json_object

ENDINGS = with_archives(".jsonl")
_FIELD = re.compile(r"\{(\w+)\}")  # in a template


@dataclasses.dataclass(frozen=True)
class Example:
    """A record of a file of examples. Methods raise UserError, beginning with `place`, for a missing or wrong field."""

    place: str  # "grammar.jsonl:3", from 1
    fields: Mapping[str, object]

    def get(self, name: str) -> object:
        """Returns the value of a field."""
        if name not in self.fields:
            raise self.error(f"no field {name!r}, {nearest(name, self.fields)}")
        return self.fields[name]

    def fill(self, template: str) -> str:
        """Returns the template with each {field} replaced by the value of the field; numbers are formatted as text."""
        return _FIELD.sub(lambda match: self._text(match[1]), template)

    def error(self, problem: str) -> UserError:
        return UserError(f"{self.place}: {problem}")

    def _text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise self.error(f"field {name!r} is {value!r}, it must be a text or a number")
        return str(value)


def read_examples(paths: Sequence[str]) -> list[Example]:
    """Returns the examples of JSON lines files; raises UserError with file and line for a line without JSON object."""
    examples = []
    for path in paths:
        with open_decompressed(path) as f:
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
    """Returns the sorted files of a file, folder (all .jsonl below it) or glob; raises UserError if there are none."""
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        below = glob.glob(os.path.join(glob.escape(path), "**", "*"), recursive=True)
        files = [file for file in below if file.endswith(ENDINGS)]
    else:
        files = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
    if not files:
        raise UserError(f"{path!r} is no file, no folder with .jsonl files and no pattern (*.jsonl) of such files")
    return sorted(files)
