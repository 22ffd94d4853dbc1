"""Resolves task names: a task shipped with the package, a description file from the user, or a kind of task."""

import dataclasses
import os
import pathlib

from pretrainax.config import UserError, nearest
from pretrainax.config.serialization import from_json
from pretrainax.files.json_files import read_object
from pretrainax.scoring.tasks.cloze import Cloze
from pretrainax.scoring.tasks.exact_match import ExactMatch
from pretrainax.scoring.tasks.minimal_pairs import MinimalPairs
from pretrainax.scoring.tasks.multiple_choice import MultipleChoice
from pretrainax.scoring.tasks.probe import Probe
from pretrainax.scoring.tasks.task import Task

KINDS: dict[str, type[Task]] = {cls.kind: cls for cls in (MinimalPairs, MultipleChoice, Cloze, ExactMatch, Probe)}
SHIPPED = {file.stem: str(file) for file in pathlib.Path(__file__).parent.joinpath("shipped").glob("*.json")}


def read_task(asked: str) -> tuple[str, Task]:
    """Finds the task that "NAME" or "NAME:PATH" specifies; returns the name of the task, and the task.

    NAME is a task shipped with the package, a .json description file, or a kind of task with its default fields. PATH,
    which provides the examples, is a JSON Lines file, a folder of JSON Lines files, or a glob.

    Raises:
      UserError: the task does not exist or has no examples, or its description has an invalid field.
    """
    name, _, path = (asked, "", "") if os.path.exists(asked) else asked.partition(":")
    if name in KINDS:
        task = KINDS[name]()
    elif name in SHIPPED:
        task = read_description(SHIPPED[name])
    elif name.endswith(".json"):
        task = read_description(os.path.expanduser(name))
        name = pathlib.Path(name).stem
    elif name.endswith((".jsonl", "/")) or os.path.exists(name):
        raise UserError(f"--tasks={asked}: name its kind of task, as {next(iter(KINDS))}:{asked}; {_allowed_names('')}")
    else:
        raise UserError(f"unknown task {name!r}, {_allowed_names(name)}")
    task.examples = path or task.examples
    if not task.examples:
        raise UserError(f"the task {name} comes without examples: give them, as --tasks={name}:my/folder")
    return name, task


def read_description(path: str) -> Task:
    """Parses the description file of a task.

    The file is a JSON object with the kind of task and the fields that differ from its defaults. A relative path to the
    examples is resolved against the folder of the description file.

    Raises:
      UserError: the kind or a field is unknown, or a value is invalid.
    """
    fields = read_object(path)
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise UserError(f"{path}: kind is {kind!r}, {nearest(str(kind), KINDS)}")
    if "type" in fields:  # `from_json` would interpret it as a class name
        raise UserError(
            f"{path}: unknown field 'type', {nearest('type', (f.name for f in dataclasses.fields(KINDS[kind])))}"
        )
    task = from_json(KINDS[kind], fields, path)
    if problems := list(task.problems()):
        raise UserError(f"{path}: {'; '.join(problems)}")
    if task.examples:
        task.examples = os.path.join(os.path.dirname(path), os.path.expanduser(task.examples))
    return task


def _allowed_names(name: str) -> str:
    return f"{nearest(name, [*SHIPPED, *KINDS])} (or give your own description file, my_task.json)"
