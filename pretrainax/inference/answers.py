"""Asks a model with the head of a task about records: what it answers to each, and what that says of it."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

import jax
import numpy as np

from pretrainax.config import Experiment, UserError
from pretrainax.data.batch import Batch, Example, Lengths
from pretrainax.data.collate import collate
from pretrainax.data.objectives import Text
from pretrainax.data.sources.base import Note, Record
from pretrainax.files.json_files import JsonObject
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.rows import bucket
from pretrainax.models import Outputs
from pretrainax.models.heads.base import HEADS
from pretrainax.sharding.axes import BATCH_AXES
from pretrainax.sharding.param_paths import PyTree
from pretrainax.tasks import Task, WritingTask

_TOGETHER = 16  # batches whose records are sorted by length, so that rows of a batch need little padding


class Answered(NamedTuple):
    """Holds what a model answers to a record."""

    answers: PyTree  # of each of its documents, NumPy arrays [d, …]
    notes: list[Note]  # of each
    is_cut: bool  # a text of it is longer than what is read


class _Documents(NamedTuple):
    """Holds what a task makes of a record."""

    examples: list[Example]
    notes: list[Note]
    is_cut: bool

    @property
    def length(self) -> int:
        return max(len(example["tokens"]) for example in self.examples)


def task_in(experiment: Experiment, origin: str) -> Task:
    """Returns the task that the model of a config has the head for.

    Args:
      origin: where the model is from, for people.

    Raises:
      UserError: a model without such a head, or a task that does not fit.
    """
    task, head = experiment.objective, experiment.model.head
    if isinstance(task, WritingTask):
        raise UserError(
            f"{origin} was trained for {type(task).__name__}, which writes texts: python -m pretrainax.generate writes "
            "after prompts, one or a file of them"
        )
    if head is None or not isinstance(task, Task):
        raise UserError(
            f"{origin} has no head of a task, by which it would say something of records: --config=finetune:TASK "
            "trains one (docs/recipes.md)"
        )
    too_long = [] if experiment.tuning is None else experiment.tuning.length_problems(experiment)
    if problems := [*task.problems(experiment), *task.head_problems(head), *too_long]:
        raise UserError(f"{origin}: {problems[0]}")
    return task


def task_of(loaded: LoadedModel, experiment: Optional[Experiment] = None) -> Task:
    """Returns the task of a model, ready to make examples; raises as `task_in` does.

    Args:
      experiment: whose objective it is, and whose rows; None: the model's own.
    """
    experiment = experiment or loaded.experiment
    return task_in(experiment, loaded.origin).adapted(experiment).bind(loaded.tokenizer)


def predict(loaded: LoadedModel, task: Task, records: Iterable[Mapping], batch_size: int = 32) -> Iterator[JsonObject]:
    """Yields what a model says of each record, in their order: fields to be written beside its own.

    Raises:
      ValueError: what is wrong with a record.
    """
    for answered in answer(loaded, task, map(task.ask, records), batch_size):
        yield task.prediction(answered.answers, answered.notes)


def answer(
    loaded: LoadedModel, task: Task, records: Iterable[Record], batch_size: int = 32, even: bool = False
) -> Iterator[Answered]:
    """Yields what a model answers to each record, in their order. They are taken as they are needed.

    Args:
      task: as `task_of` gives it.
      batch_size: rows that the model reads at a time, at most; more where that many do not divide among the devices.
      even: pads each row to the longest that there may be, so that all answers have one shape; else to those beside it.

    Raises:
      UserError: a record that has no tokens.
    """
    documents = (_documents(loaded, task, record) for record in records)
    while together := list(itertools.islice(documents, batch_size * _TOGETHER)):
        answered: dict[int, Answered] = {}
        for numbers in _lots(together, batch_size):
            lot = [together[number] for number in numbers]
            length = task.longest if even else bucket(max(of.length for of in lot), task.longest)
            answers = _ask(loaded, [example for of in lot for example in of.examples], batch_size, length)
            ends = np.cumsum([len(of.examples) for of in lot])
            for number, of, end in zip(numbers, lot, ends, strict=True):
                own = slice(end - len(of.examples), end)
                answered[number] = Answered(jax.tree.map(lambda x, own=own: x[own], answers), of.notes, of.is_cut)
        yield from (answered[number] for number in range(len(together)))


def _documents(loaded: LoadedModel, task: Task, record: Record) -> _Documents:
    """Returns what a task makes of a record, without a label if that has none."""
    examples, notes, is_cut = [], [], False
    for encoded in task.encode(record, loaded.tokenizer):
        tokens = np.concatenate(encoded.parts).astype(np.int32)
        ends = np.cumsum([len(ids) for ids in encoded.parts])
        text = Text(tokens, np.ones_like(tokens), ends, note=encoded.note)
        examples.append(task.example(text, np.random.default_rng(0), loaded.tokenizer.vocabulary))
        notes.append({**encoded.note, "parts": ends.tolist()})
        is_cut |= task.is_cut(encoded)
    if not examples or not all(len(example["tokens"]) for example in examples):
        raise UserError(
            f"the texts {record.texts!r:.80} have no tokens, and nothing stands around them: leave them out"
        )
    return _Documents(examples, notes, is_cut)


def _lots(together: Sequence[_Documents], rows: int) -> Iterator[list[int]]:
    """Yields the numbers of records of like length, whose documents make at least so many rows together."""
    lot, size = [], 0
    for number in sorted(range(len(together)), key=lambda number: together[number].length):
        lot.append(number)
        size += len(together[number].examples)
        if size >= rows:
            yield lot
            lot, size = [], 0
    if lot:
        yield lot


def _ask(loaded: LoadedModel, examples: Sequence[Example], rows: int, length: int) -> PyTree:
    """Returns the answers of the head to examples, arrays [n, …], in batches of at most so many rows of a length."""
    parts = math.prod(loaded.mesh.shape[axis] for axis in BATCH_AXES)
    pad, found = loaded.tokenizer.vocabulary.pad or 0, []
    for start in range(0, len(examples), rows):
        some = [[example] for example in examples[start : start + rows]]
        count = -(-min(bucket(len(some), shortest=1), rows) // parts) * parts  # few shapes: the last one is repeated
        batch = collate(some + some[-1:] * (count - len(some)), Lengths(length, length, length), pad)
        found.append(jax.device_get(loaded.ask(_answers, batch)))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[: len(examples)], *found)


def _answers(outputs: Outputs, batch: Batch) -> PyTree:
    (name,) = outputs.heads  # a model of a task has one
    return HEADS[name].answers(outputs.heads[name], batch)
