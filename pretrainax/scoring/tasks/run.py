"""Runs tasks on a model: `run_tasks(loaded, load_tasks(["blimp:my/folder", "gsm8k:test.jsonl"]))`."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from pretrainax.config import UserError
from pretrainax.inference.loaded import LoadedModel
from pretrainax.scoring.results import Estimate, Result
from pretrainax.scoring.tasks.descriptions import read_task
from pretrainax.scoring.tasks.examples import find, read_examples
from pretrainax.scoring.tasks.task import Task, TaskMetric
from pretrainax.scoring.transcripts import Record, discard


class LoadedTask(NamedTuple):
    """A task with its name and its parsed examples."""

    name: str
    task: Task
    asked: list[tuple]  # all examples, as parsed by `task.read`


def load_tasks(tasks: Sequence[str]) -> list[LoadedTask]:
    """Loads tasks by name, together with their examples. Tasks with equal names are numbered: "cloze#1", "cloze#2".

    Args:
      tasks: names in the syntax of `read_task`.

    Raises:
      UserError: a task is unknown, or an example is invalid.
    """
    loaded_tasks, described = [], list(map(read_task, tasks))
    names = [name for name, _ in described]
    for i, (name, task) in enumerate(described):
        examples = [task.read(example) for example in read_examples(find(task.examples))]
        number = f"#{1 + names[:i].count(name)}" if names.count(name) > 1 else ""
        loaded_tasks.append(LoadedTask(name + number, task, examples))
    return loaded_tasks


def run_tasks(
    loaded: LoadedModel, tasks: Sequence[LoadedTask], most: Optional[int] = None, record: Record = discard
) -> Iterator[list[Result]]:
    """Evaluates a model on tasks; yields the results of one task at a time.

    The model does not answer an example that does not fit into its context. The metrics omit such an example, and the
    counts state the number of these examples.

    Args:
      most: maximum number of examples per task, evenly spaced over all examples. None means all examples.
      record: receives the transcript of each example, from which the metrics are computed.

    Raises:
      UserError: `most` is below 1, or the model does not support one of the tasks; raised before any task is run.
    """
    if most is not None and most < 1:
        raise UserError(f"--examples={most}: it must be at least 1")
    descriptions = [task.how(loaded) for _, task, _ in tasks]
    for (name, task, asked), description in zip(tasks, descriptions, strict=True):
        count = len(asked) if most is None else min(most, len(asked))
        chosen = [i * len(asked) // count for i in range(count)]
        transcripts = task.transcripts(loaded, asked, chosen)
        for index, transcript in zip(chosen, transcripts, strict=True):
            record({"kind": task.kind, "source": name, "example": index, **transcript})
        answered = [transcript for transcript in transcripts if transcript["asked"]]
        other = {
            "left out by --examples": len(asked) - count,
            "not asked: too long for the context": count - len(answered),
            "prompts with fewer shots": sum(transcript.get("dropped_shots", 0) > 0 for transcript in answered),
        }
        other = {name: number for name, number in other.items() if number}
        no_metrics = [TaskMetric(measure, Estimate(math.nan, None), 0) for measure in task.measures]
        yield [
            Result(
                name,
                metric.measure,
                counts={"examples": metric.examples} | ({} if metric.part else other),
                how=description,
                part=metric.part,
                origin=loaded.origin,
                **metric.estimate._asdict(),
            )
            for metric in (task.metrics(answered) if answered else no_metrics)
        ]
