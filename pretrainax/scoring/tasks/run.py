"""Asks a model the examples of tasks: `run_tasks(loaded, ["blimp:my/folder", "gsm8k:test.jsonl"])`."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from pretrainax.config import UserError
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.results import Result
from pretrainax.scoring.tasks.descriptions import read_task
from pretrainax.scoring.tasks.examples import find, read_examples
from pretrainax.scoring.tasks.task import Task


class Ready(NamedTuple):
    """A task whose examples are read."""

    name: str
    task: Task
    asked: list[tuple]  # what `task.read` gives of each example


def ready(tasks: Sequence[str]) -> list[Ready]:
    """Returns the tasks of these names, see `read_task`; UserError for one that is not there or has a wrong example."""
    found = []
    for name, task in map(read_task, tasks):
        found.append(Ready(name, task, [task.read(example) for example in read_examples(find(task.examples))]))
    return found


def run_tasks(loaded: LoadedModel, tasks: Sequence[Ready], most: Optional[int] = None) -> Iterator[list[Result]]:
    """Yields the results of each task.

    Args:
      most: examples of a task that are asked, evenly spaced over all it has; None: all.

    Raises:
      UserError: `most` is not 1 or more, or the model cannot be asked one of the tasks: before any of them is.
    """
    if most is not None and most < 1:
        raise UserError(f"--examples={most}: it must be at least 1")
    how = [task.how(loaded) for _, task, _ in tasks]
    for (name, task, asked), line in zip(tasks, how, strict=True):
        count = len(asked) if most is None else min(most, len(asked))
        figures = task.figures(loaded, asked, [i * len(asked) // count for i in range(count)])
        left = {"left out by --examples": len(asked) - count} if count < len(asked) else {}
        yield [
            Result(
                name,
                figure.measure,
                *figure.estimate,
                {"examples": figure.examples} | ({} if figure.part else left) | dict(figure.other),
                line,
                figure.part,
                loaded.origin,
            )
            for figure in figures
        ]
