"""Applies a model with a task head to records, and converts the outputs of the head to predictions."""

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

_SORTED_BATCHES = 16  # number of batches whose records are sorted by length together, to reduce padding


class TaskOutputs(NamedTuple):
    """The outputs of the task head for one record."""

    predictions: PyTree  # outputs for the d documents of the record, NumPy arrays [d, …]
    notes: list[Note]  # metadata of the d documents
    is_cut: bool  # True if a text of the record was truncated


class _Documents(NamedTuple):
    """The model inputs for one record, with their metadata. A task may need several documents per record."""

    examples: list[Example]
    notes: list[Note]
    is_cut: bool

    @property
    def length(self) -> int:
        return max(len(example["tokens"]) for example in self.examples)


def task_in(experiment: Experiment, origin: str) -> Task:
    """Returns the task of the model's head, from the objective of `experiment`.

    Args:
      origin: description of the model for error messages.

    Raises:
      UserError: the model has no task head, or the task does not match the head or the config.
    """
    task, head = experiment.objective, experiment.model.head
    if isinstance(task, WritingTask):
        raise UserError(
            f"{origin} was trained for {type(task).__name__}, which writes texts: python -m pretrainax.generate takes "
            "prompts"
        )
    if head is None or not isinstance(task, Task):
        raise UserError(
            f"{origin} has no head of a task, which predictions need: --config=finetune:TASK trains one "
            "(docs/recipes.md)"
        )
    too_long = [] if experiment.tuning is None else experiment.tuning.length_problems(experiment)
    if problems := [*task.problems(experiment), *task.head_problems(head), *too_long]:
        raise UserError(f"{origin}: {problems[0]}")
    return task


def task_of(loaded: LoadedModel, experiment: Optional[Experiment] = None) -> Task:
    """Returns the task of a model, bound to the tokenizer; raises UserError for the same reasons as `task_in`.

    Args:
      experiment: config with the objective and the sequence length; None: the config of the model.
    """
    experiment = experiment or loaded.experiment
    return task_in(experiment, loaded.origin).adapted(experiment).bind(loaded.tokenizer)


def predict(loaded: LoadedModel, task: Task, records: Iterable[Mapping], batch_size: int = 32) -> Iterator[JsonObject]:
    """Yields the prediction for each record, in order, as a JSON object with the fields to add to the record.

    Args:
      records: fields of each record; labels are not needed.
      batch_size: maximum rows of a batch, as in `task_outputs`.

    Raises:
      ValueError: a record is invalid.
    """
    for answered in task_outputs(loaded, task, map(task.read_unlabeled, records), batch_size):
        yield task.prediction(answered.predictions, answered.notes)


def task_outputs(
    loaded: LoadedModel, task: Task, records: Iterable[Record], batch_size: int = 32, even: bool = False
) -> Iterator[TaskOutputs]:
    """Yields the outputs of the task head for each record, in order; consumes the records lazily.

    Args:
      task: from `task_of`.
      batch_size: maximum rows of a batch, rounded up to a multiple of the number of devices that share the rows.
      even: True pads all rows to the maximum length of the task, so that the outputs for all records have the same
        shape. False pads the rows of each batch to a common length.

    Raises:
      UserError: a record has no tokens.
    """
    documents = (_documents(loaded, task, record) for record in records)
    while pending := list(itertools.islice(documents, batch_size * _SORTED_BATCHES)):
        answered: dict[int, TaskOutputs] = {}
        for numbers in _groups(pending, batch_size):
            group = [pending[number] for number in numbers]
            length = task.longest if even else bucket(max(item.length for item in group), task.longest)
            answers = _ask(loaded, [example for item in group for example in item.examples], batch_size, length)
            ends = np.cumsum([len(item.examples) for item in group])
            for number, item, end in zip(numbers, group, ends, strict=True):
                own = slice(end - len(item.examples), end)
                answered[number] = TaskOutputs(
                    jax.tree.map(lambda x, own=own: x[own], answers), item.notes, item.is_cut
                )
        yield from (answered[number] for number in range(len(pending)))


def _documents(loaded: LoadedModel, task: Task, record: Record) -> _Documents:
    """Returns the model inputs for a record; they have no labels if the record has none."""
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
            f"the texts {record.texts!r:.80} have no tokens, and no special tokens are added: leave them out"
        )
    return _Documents(examples, notes, is_cut)


def _groups(documents: Sequence[_Documents], rows: int) -> Iterator[list[int]]:
    """Yields lists of indices of records with similar length; each list but the last has at least `rows` documents."""
    group, size = [], 0
    for number in sorted(range(len(documents)), key=lambda number: documents[number].length):
        group.append(number)
        size += len(documents[number].examples)
        if size >= rows:
            yield group
            group, size = [], 0
    if group:
        yield group


def _ask(loaded: LoadedModel, examples: Sequence[Example], rows: int, length: int) -> PyTree:
    """Returns the outputs of the task head for n examples, as arrays [n, …].

    Args:
      rows: maximum number of examples per batch.
      length: tokens per row, with padding.
    """
    parts = math.prod(loaded.mesh.shape[axis] for axis in BATCH_AXES)
    pad, outputs = loaded.tokenizer.vocabulary.pad or 0, []
    for start in range(0, len(examples), rows):
        some = [[example] for example in examples[start : start + rows]]
        count = -(-min(bucket(len(some), shortest=1), rows) // parts) * parts  # few shapes: repeats the last example
        batch = collate(some + some[-1:] * (count - len(some)), Lengths(length, length, length), pad)
        outputs.append(jax.device_get(loaded.compute(_answers, batch)))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[: len(examples)], *outputs)


def _answers(outputs: Outputs, batch: Batch) -> PyTree:
    (name,) = outputs.heads  # a task model has one head
    return HEADS[name].predictions(outputs.heads[name], batch)
