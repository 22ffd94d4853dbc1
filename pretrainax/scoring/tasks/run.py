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
    asked: list[tuple]  # all examples, as parsed by `task.read`


def load_tasks(tasks: Sequence[str]) -> list[LoadedTask]:
    """Loads tasks by name, together with their examples.

    Args:
      tasks: names in the syntax of `read_task`.

    Raises:
      UserError: a task is unknown, or an example is invalid.
    """
    loaded_tasks = []
    for name, task in map(read_task, tasks):
        loaded_tasks.append(
            LoadedTask(name, task, [task.read(example) for example in read_examples(find(task.examples))])
        )
    return loaded_tasks


def run_tasks(loaded: LoadedModel, tasks: Sequence[LoadedTask], most: Optional[int] = None) -> Iterator[list[Result]]:
    """Evaluates a model on tasks; yields the results of one task at a time.

    Args:
      most: maximum number of examples per task, evenly spaced over all examples. None means all examples.

    Raises:
      UserError: `most` is below 1, or the model does not support one of the tasks; raised before any task is run.
    """
    if most is not None and most < 1:
        raise UserError(f"--examples={most}: it must be at least 1")
    descriptions = [task.how(loaded) for _, task, _ in tasks]
    for (name, task, asked), description in zip(tasks, descriptions, strict=True):
        count = len(asked) if most is None else min(most, len(asked))
        metrics = task.metrics(loaded, asked, [i * len(asked) // count for i in range(count)])
        skip_counts = {"left out by --examples": len(asked) - count} if count < len(asked) else {}
        yield [
            Result(
                name,
                metric.measure,
                *metric.estimate,
                {"examples": metric.examples} | ({} if metric.part else skip_counts) | dict(metric.other),
                description,
                metric.part,
                loaded.origin,
            )
            for metric in metrics
        ]
