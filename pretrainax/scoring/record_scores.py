"""Computes the metrics of a task on a data source of records, from the predictions of the task head and the labels."""

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Optional

import jax
import numpy as np

from pretrainax.config import Experiment, UserError
from pretrainax.config.metric import FRACTION, declared
from pretrainax.data.sources import Source
from pretrainax.data.sources.base import Note, Record
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.predictions import task_of, task_outputs
from pretrainax.scoring.corpus_scores import SPLITS, Watch, documents_of
from pretrainax.scoring.results import Estimate, Result, jackknife
from pretrainax.scoring.transcripts import Record as Transcribe
from pretrainax.scoring.transcripts import discard
from pretrainax.sharding.param_paths import PyTree
from pretrainax.tasks import Task
from pretrainax.tasks.baselines import metrics_or_nan
from pretrainax.tasks.chunks import group_numbers

_GROUPS = 20  # number of groups of records of the jackknife, which computes the metrics once per group


def score_records(
    loaded: LoadedModel,
    experiment: Experiment,
    source: Source,
    split: str = "valid",
    records: Optional[int] = None,
    watch: Watch = iter,
    record: Transcribe = discard,
) -> list[Result]:
    """Computes the metrics of a task on a data source of records, as during validation, but without the loss.

    Args:
      experiment: config whose objective is the task; defines the sequence length.
      split: "valid", "train", or "all" for both.
      records: maximum number of records, from the start of the split. None means all records.
      watch: wraps an iterable of records and yields them unchanged, to display progress.
      record: receives the outputs of the head and the labels of each record.

    Raises:
      UserError: the model has no head for the task, or the source has no valid record.
    """
    task, skipped, num_truncated = task_of(loaded, experiment), collections.Counter(), 0
    documents = watch(itertools.islice(documents_of(source.reading(task), split, skipped), records))
    predictions, notes, groups, name = [], [], [], f"{source}, {SPLITS[split]}"

    def task_records() -> Iterator[Record]:
        for item in documents:
            if isinstance(item, Record) and not task.is_skipped(item):
                groups.append(task.group(item))
                yield item

    for output in task_outputs(loaded, task, task_records(), even=True):
        outputs = {"outputs": output.predictions, "notes": output.notes, "cut": bool(output.is_cut)}
        record({"kind": type(task).__name__, "source": name, "record": len(notes), **outputs})
        predictions.append(output.predictions)
        notes.append(output.notes)
        num_truncated += output.is_cut
    if not notes:
        skip_summary = "".join(f", {count:,} {reason}" for reason, count in skipped.items() if count)
        raise UserError(
            f"{source} holds no record ({SPLITS[split]}{skip_summary}); select a split with --split={'|'.join(SPLITS)}"
        )
    counts = {"records": len(notes), "records cut short": num_truncated} if num_truncated else {"records": len(notes)}
    counts |= {f"{reason} skipped": count for reason, count in skipped.items()}
    method = f"{type(task).__name__}, as in a run's own validation"
    return [
        Result(name, metric, counts=counts, how=method, **estimate._asdict())
        for metric, estimate in record_estimates(task, predictions, notes, group_numbers(groups)).items()
    ]


def record_estimates(
    task: Task, predictions: Sequence[PyTree], notes: Sequence[Sequence[Note]], clusters: np.ndarray
) -> dict[str, Estimate]:
    """Computes the metrics of n records, and their errors by a jackknife over groups of clusters.

    Args:
      predictions: outputs of the head for the d model inputs of each record, NumPy arrays [d, …].
      notes: the notes of the d model inputs of each record.
      clusters: the number of the cluster of each record, from 0, [n]; records of a cluster are dependent.
    """

    def metrics(rows: Sequence[int]) -> dict[str, float]:
        chosen = jax.tree.map(lambda *arrays: np.concatenate(arrays), *(predictions[i] for i in rows))
        return metrics_or_nan(task, chosen, [note for i in rows for note in notes[i]])

    num_clusters = int(clusters.max()) + 1
    groups = min(num_clusters, _GROUPS)
    rest = [np.flatnonzero(clusters % groups != group).tolist() for group in range(groups)] if groups > 1 else []
    without = [metrics(rows) for rows in rest]
    return {
        name: jackknife(value, [found[name] for found in without], num_clusters, declared(name).unit == FRACTION)
        for name, value in metrics(range(len(notes))).items()
    }
