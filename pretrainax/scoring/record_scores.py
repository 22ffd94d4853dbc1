"""Computes the metrics of a task on a data source of records, from the predictions of the task head and the labels."""

import collections
import itertools
from typing import Optional

import jax
import numpy as np

from pretrainax.config import Experiment, UserError
from pretrainax.data.sources import Source
from pretrainax.data.sources.base import Record
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.predictions import task_of, task_outputs
from pretrainax.scoring.corpus_scores import SPLITS, Watch, documents_of
from pretrainax.scoring.results import Result


def score_records(
    loaded: LoadedModel,
    experiment: Experiment,
    source: Source,
    split: str = "valid",
    records: Optional[int] = None,
    watch: Watch = iter,
) -> list[Result]:
    """Computes the metrics of a task on a data source of records, as during validation, but without the loss.

    Args:
      experiment: config whose objective is the task; defines the sequence length.
      split: "valid", "train", or "all" for both.
      records: maximum number of records, from the start of the split. None means all records.
      watch: wraps an iterable of records and yields them unchanged, to display progress.

    Raises:
      UserError: the model has no head for the task, or the source has no valid record.
    """
    task, skipped, num_truncated = task_of(loaded, experiment), collections.Counter(), 0
    documents = watch(itertools.islice(documents_of(source.reading(task), split, skipped), records))
    predictions, notes, num_records = [], [], 0
    task_records = (item for item in documents if isinstance(item, Record) and not task.is_skipped(item))
    for output in task_outputs(loaded, task, task_records, even=True):
        predictions.append(output.predictions)
        notes += output.notes
        num_records, num_truncated = num_records + 1, num_truncated + output.is_cut
    if not num_records:
        skip_summary = "".join(f", {count:,} {reason}" for reason, count in skipped.items() if count)
        raise UserError(
            f"{source} holds no record ({SPLITS[split]}{skip_summary}); select a split with --split={'|'.join(SPLITS)}"
        )
    all_predictions = jax.tree.map(lambda *arrays: np.concatenate(arrays), *predictions)
    counts = {"records": num_records, "records cut short": num_truncated} if num_truncated else {"records": num_records}
    counts |= {f"{reason} skipped": count for reason, count in skipped.items()}
    name, method = f"{source}, {SPLITS[split]}", f"{type(task).__name__}, as in a run's own validation"
    return [
        Result(name, metric, value, None, counts, method)
        for metric, value in task.metrics(all_predictions, notes).items()
    ]
