"""Applies a model with a task head to records, and converts the head's outputs to predictions."""

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

import jax
import numpy as np

from pretrainax.config import Diverged, Experiment, UserError
from pretrainax.data.batch import Batch, Example, Lengths
from pretrainax.data.collate import collate
from pretrainax.data.line_ends import normalize_line_ends
from pretrainax.data.objectives import ObjectiveInput
from pretrainax.data.preparation.shards import Encoded
from pretrainax.data.sources.base import Note, Record
from pretrainax.files.json_files import JsonObject
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.rows import bucket
from pretrainax.models import Outputs
from pretrainax.models.heads.base import HEADS
from pretrainax.sharding.axes import BATCH_AXES
from pretrainax.sharding.param_paths import PyTree
from pretrainax.tasks import Task, WritingTask
from pretrainax.tokenization.base import Tokenizer

_SORTED_BATCHES = 16  # number of batches whose records are sorted by length together, to reduce padding


class TaskOutputs(NamedTuple):
    """The outputs of the task head for one record."""

    predictions: PyTree  # outputs for the d model inputs of the record, NumPy arrays [d, …]
    notes: list[Note]  # metadata of the d model inputs
    is_cut: bool  # True if a text of the record was truncated


class _Documents(NamedTuple):
    """The model inputs for one record, with their metadata. A task may need several model inputs per record."""

    examples: list[Example]
    notes: list[Note]
    is_cut: bool

    @property
    def length(self) -> int:
        return max(len(example["tokens"]) for example in self.examples)


def task_in(experiment: Experiment, origin: str) -> Task:
    """Checks and returns the objective of `experiment`, which must be a task that matches the model's head.

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
            "(docs/how-to/fine-tune.md)"
        )
    too_long = [] if experiment.tuning is None else experiment.tuning.length_problems(experiment)
    if problems := [*task.problems(experiment), *task.head_problems(head), *too_long]:
        raise UserError(f"{origin}: {problems[0]}")
    return task


def task_of(loaded: LoadedModel, experiment: Optional[Experiment] = None) -> Task:
    """Returns the task of a model, bound to the tokenizer; raises UserError as `task_in` does.

    Args:
      experiment: config with the objective and the sequence length, or None for the config of the loaded model.
    """
    experiment = experiment or loaded.experiment
    return task_in(experiment, loaded.origin).adapted(experiment).bind(loaded.tokenizer)


def predict(loaded: LoadedModel, task: Task, records: Iterable[Mapping], batch_size: int = 32) -> Iterator[JsonObject]:
    """Yields the prediction for each record, in order, as a JSON object with the fields to add to the record.

    Args:
      records: the fields of each record; labels are not needed.
      batch_size: maximum number of rows per batch, as in `task_outputs`.

    Raises:
      ValueError: a record is invalid.
    """
    unlabeled = (read_unlabeled(task, fields) for fields in records)
    for outputs in task_outputs(loaded, task, unlabeled, batch_size):
        yield task.prediction(outputs.predictions, outputs.notes)


def read_unlabeled(task: Task, fields: Mapping) -> Record:
    """Converts the fields of an entry to a record, and the line ends in its text to the line ends of training.

    Raises:
      ValueError: the entry is invalid.
    """
    record = task.read_unlabeled(fields)
    return Record(tuple(normalize_line_ends(text, collections.Counter()) for text in record.texts), record.note)


def check_tokens(task: Task, record: Record, tokenizer: Tokenizer) -> None:
    """Raises ValueError if a model would read no token of a record; `task` is bound to `tokenizer`."""
    if not task.measure(0).inputs and not any(map(len, tokenizer.encode_batch(list(record.texts)))):
        raise ValueError(f"the texts {record.texts!r:.80} have no tokens, and no special tokens are added")


def task_outputs(
    loaded: LoadedModel, task: Task, records: Iterable[Record], batch_size: int = 32, even: bool = False
) -> Iterator[TaskOutputs]:
    """Yields the outputs of the task head for each record, in order; consumes the records lazily.

    Args:
      task: the result of `task_of`.
      batch_size: maximum number of rows per batch, rounded up to a multiple of the number of devices that shard the
        rows.
      even: whether to pad all rows to the maximum length of the task. If True, the outputs of all records have the same
        shape. If False, rows are padded to a common length per batch.

    Raises:
      UserError: a record has no tokens.
      Diverged: an output is NaN.
    """
    documents = (_documents(loaded, task, record) for record in records)
    while pending := list(itertools.islice(documents, batch_size * _SORTED_BATCHES)):
        outputs_by_index: dict[int, TaskOutputs] = {}
        for indices in _groups(pending, batch_size):
            group = [pending[index] for index in indices]
            length = task.longest if even else bucket(max(item.length for item in group), task.longest)
            outputs = _run_head(loaded, [example for item in group for example in item.examples], batch_size, length)
            ends = np.cumsum([len(item.examples) for item in group])
            for index, item, end in zip(indices, group, ends, strict=True):
                rows = slice(end - len(item.examples), end)
                outputs_by_index[index] = TaskOutputs(
                    jax.tree.map(lambda x, rows=rows: x[rows], outputs), item.notes, item.is_cut
                )
        yield from (outputs_by_index[index] for index in range(len(pending)))


def note_of(encoded: Encoded) -> Note:
    """Returns the note of a document with the ends of its parts, which the metrics and baselines of its task read."""
    return {**encoded.note, "parts": np.cumsum([len(ids) for ids in encoded.parts]).tolist()}


def _documents(loaded: LoadedModel, task: Task, record: Record) -> _Documents:
    """Builds the model inputs for a record; the inputs have labels if the record has a label."""
    examples, metadata, is_cut = [], [], False
    for encoded in task.encode(record, loaded.tokenizer):
        tokens = np.concatenate(encoded.parts).astype(np.int32)
        part_ends = np.cumsum([len(ids) for ids in encoded.parts])
        text = ObjectiveInput(tokens, np.ones_like(tokens), part_ends, note=encoded.note)
        examples.append(task.example(text, np.random.default_rng(0), loaded.tokenizer.vocabulary))
        metadata.append(note_of(encoded))
        is_cut |= task.is_cut(encoded)
    if not examples or not all(len(example["tokens"]) for example in examples):
        raise UserError(
            f"the texts {record.texts!r:.80} have no tokens, and no special tokens are added: leave them out"
        )
    return _Documents(examples, metadata, is_cut)


def _groups(documents: Sequence[_Documents], rows: int) -> Iterator[list[int]]:
    """Groups records of similar length; yields lists of record indices.

    Each group except the last has at least `rows` model inputs.
    """
    group, size = [], 0
    for index in sorted(range(len(documents)), key=lambda index: documents[index].length):
        group.append(index)
        size += len(documents[index].examples)
        if size >= rows:
            yield group
            group, size = [], 0
    if group:
        yield group


def _run_head(loaded: LoadedModel, examples: Sequence[Example], rows: int, length: int) -> PyTree:
    """Runs the model on n examples; returns the outputs of the task head as arrays [n, …].

    Args:
      rows: maximum number of examples per batch.
      length: padded length of a row in tokens.
    """
    num_shards = math.prod(loaded.mesh.shape[axis] for axis in BATCH_AXES)
    pad, outputs = loaded.tokenizer.vocabulary.pad or 0, []
    for start in range(0, len(examples), rows):
        chunk = [[example] for example in examples[start : start + rows]]
        # Repeats the last example, so that batches have few shapes.
        count = -(-min(bucket(len(chunk), shortest=1), rows) // num_shards) * num_shards
        batch = collate(chunk + chunk[-1:] * (count - len(chunk)), Lengths(length, length, length), pad)
        outputs.append(jax.device_get(loaded.compute(_head_predictions, batch)))
        if any(np.isnan(array).any() for array in jax.tree.leaves(outputs[-1])):
            raise Diverged(f"{loaded.origin}: outputs of its task head are not numbers (NaN); did the run diverge?")
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[: len(examples)], *outputs)


def _head_predictions(outputs: Outputs, batch: Batch) -> PyTree:
    (name,) = outputs.heads  # a task model has one head
    return HEADS[name].predictions(outputs.heads[name], batch)
