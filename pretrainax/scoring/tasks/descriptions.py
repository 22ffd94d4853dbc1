"""Finds the task that a user names: one of the package, a description of their own, or a kind by itself."""

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
from pretrainax.scoring.tasks.task import Task

KINDS: dict[str, type[Task]] = {cls.kind: cls for cls in (MinimalPairs, MultipleChoice, Cloze, ExactMatch)}
SHIPPED = {file.stem: str(file) for file in pathlib.Path(__file__).parent.joinpath("shipped").glob("*.json")}


def read_task(asked: str) -> tuple[str, Task]:
    """Returns the name and the task of "NAME", or of "NAME:PATH" with the examples of PATH.

    NAME is a task of the package, the .json file of a description, or a kind, whose fields are then as by default. PATH
    is a file of JSON lines, a folder of such or a glob.

    Raises:
      UserError: there is no such task, it has no examples, or its description has a field that is wrong.
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
        raise UserError(f"--tasks={asked}: say what its examples are, as {next(iter(KINDS))}:{asked}; {_allowed('')}")
    else:
        raise UserError(f"unknown task {name!r}, {_allowed(name)}")
    task.examples = path or task.examples
    if not task.examples:
        raise UserError(f"the task {name} comes without examples: give them, as --tasks={name}:my/folder")
    return name, task


def read_description(path: str) -> Task:
    """Returns the task that a file describes: a JSON object of its kind and of the fields that are not as by default.

    Its examples lie where it says, from its own folder.
    """
    fields = read_object(path)
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise UserError(f"{path}: kind is {kind!r}, {nearest(str(kind), KINDS)}")
    if "type" in fields:  # which would name a class
        raise UserError(
            f"{path}: unknown field 'type', {nearest('type', (f.name for f in dataclasses.fields(KINDS[kind])))}"
        )
    task = from_json(KINDS[kind], fields, path)
    if problems := list(task.problems()):
        raise UserError(f"{path}: {'; '.join(problems)}")
    if task.examples:
        task.examples = os.path.join(os.path.dirname(path), os.path.expanduser(task.examples))
    return task


def _allowed(name: str) -> str:
    return f"{nearest(name, [*SHIPPED, *KINDS])} Or give a description of your own, my_task.json"
