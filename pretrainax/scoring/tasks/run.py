"""Runs tasks on a model: `run_tasks(loaded, load_tasks(["blimp:my/folder", "gsm8k:test.jsonl"]))`."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from pretrainax.config import UserError
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.results import Result
from pretrainax.scoring.tasks.descriptions import read_task
from pretrainax.scoring.tasks.examples import find, read_examples
from pretrainax.scoring.tasks.task import Task


class LoadedTask(NamedTuple):
    """A task with its name and its parsed examples."""

    name: str
    task: Task
    asked: list[tuple]  # all examples, parsed by `task.read`


def load_tasks(tasks: Sequence[str]) -> list[LoadedTask]:
    """Returns the tasks with the names `tasks`, including their examples.

    Args:
      tasks: names as in `read_task`.

    Raises:
      UserError: a task is unknown, or an example is invalid.
    """
    tasks_read = []
    for name, task in map(read_task, tasks):
        tasks_read.append(
            LoadedTask(name, task, [task.read(example) for example in read_examples(find(task.examples))])
        )
    return tasks_read


def run_tasks(loaded: LoadedModel, tasks: Sequence[LoadedTask], most: Optional[int] = None) -> Iterator[list[Result]]:
    """Yields the results of a model on each task.

    Args:
      most: maximum number of examples per task, evenly spaced over all examples; None: all examples.

    Raises:
      UserError: `most` is below 1, or the model does not support one of the tasks. In this case, no task is run.
    """
    if most is not None and most < 1:
        raise UserError(f"--examples={most}: it must be at least 1")
    how = [task.how(loaded) for _, task, _ in tasks]
    for (name, task, asked), line in zip(tasks, how, strict=True):
        count = len(asked) if most is None else min(most, len(asked))
        figures = task.metrics(loaded, asked, [i * len(asked) // count for i in range(count)])
        skipped = {"left out by --examples": len(asked) - count} if count < len(asked) else {}
        yield [
            Result(
                name,
                figure.measure,
                *figure.estimate,
                {"examples": figure.examples} | ({} if figure.part else skipped) | dict(figure.other),
                line,
                figure.part,
                loaded.origin,
            )
            for figure in figures
        ]
