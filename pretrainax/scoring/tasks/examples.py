"""Reads the examples of a task from JSON Lines files, in the format in which they were published."""

import dataclasses
import glob
import json
import os
import re
from collections.abc import Mapping, Sequence

from pretrainax.config import UserError, nearest
from pretrainax.data.files import open_decompressed, with_archives
from pretrainax.data.sources.records import json_object

ENDINGS = with_archives(".jsonl")
_FIELD = re.compile(r"\{(\w+)\}")  # a field name in a template


@dataclasses.dataclass(frozen=True)
class Example:
    """One example of a task: a JSON object from a JSON Lines file.

    The methods raise UserError for a missing or invalid field. The error message begins with `place`.
    """

    place: str  # file and line number: "grammar.jsonl:3"
    fields: Mapping[str, object]

    def get(self, name: str) -> object:
        """Returns the value of a field; raises UserError if the example lacks the field."""
        if name not in self.fields:
            raise self.error(f"no field {name!r}, {nearest(name, self.fields)}")
        return self.fields[name]

    def fill(self, template: str) -> str:
        """Replaces each {field} in a template with the value of the field, which must be a string or a number."""
        return _FIELD.sub(lambda match: self._field_text(match[1]), template)

    def error(self, problem: str) -> UserError:
        return UserError(f"{self.place}: {problem}")

    def _field_text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise self.error(f"field {name!r} is {value!r}, it must be a text or a number")
        return str(value)


def read_examples(paths: Sequence[str]) -> list[Example]:
    """Reads the examples from JSON Lines files; ignores blank lines.

    Raises:
      UserError: a line is not a JSON object, or has an unpaired surrogate (the message contains the file and the line
        number), or the files have no example.
    """
    examples = []
    for path in paths:
        with open_decompressed(path) as f:
            for number, line in enumerate(f, 1):
                if line.isspace():
                    continue
                place = f"{path}:{number}"
                try:
                    fields = json_object(line)
                    json.dumps(fields, ensure_ascii=False).encode()  # raises ValueError for an unpaired surrogate
                    examples.append(Example(place, fields))
                except (ValueError, RecursionError) as e:
                    raise UserError(f"{place}: {e}") from e
    if not examples:
        raise UserError(f"{', '.join(paths)} holds no example: give a file of JSON lines that has some")
    return examples


def find(path: str) -> list[str]:
    """Resolves `path` (a file, folder or glob) to a sorted list of file paths.

    A folder stands for all .jsonl files in the folder and its subfolders, including compressed .jsonl files.

    Raises:
      UserError: `path` refers to no files.
    """
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        entries = glob.glob(os.path.join(glob.escape(path), "**", "*"), recursive=True)
        files = [file for file in entries if file.endswith(ENDINGS)]
    else:
        files = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
    if not files:
        raise UserError(f"{path!r} is no file, no folder with .jsonl files and no pattern (*.jsonl) of such files")
    return sorted(files)
