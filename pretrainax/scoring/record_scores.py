"""Computes the metrics of a task on a source of records, from the outputs of the task head and the labels."""

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
    """Returns the metrics of a task on a source of records, as in the validation of a run, but without the loss.

    Args:
      experiment: config with the task as its objective, and the sequence length.
      split: "valid", "train", or "all" for both.
      records: maximum number of records, from the start of the split; None: all records.
      watch: a function that yields the records it gets, for a progress display.

    Raises:
      UserError: the model has no head for the task, or there is no valid record.
    """
    task, skipped, cut = task_of(loaded, experiment), collections.Counter(), 0
    documents = watch(itertools.islice(documents_of(source.reading(task), split, skipped), records))
    answers, notes, count = [], [], 0
    task_records = (item for item in documents if isinstance(item, Record) and not task.is_skipped(item))
    for each in task_outputs(loaded, task, task_records, even=True):
        answers.append(each.predictions)
        notes += each.notes
        count, cut = count + 1, cut + each.is_cut
    if not count:
        seen = "".join(f", {number:,} {reason}" for reason, number in skipped.items() if number)
        raise UserError(
            f"{source} holds no record ({SPLITS[split]}{seen}); select a split with --split={'|'.join(SPLITS)}"
        )
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *answers)
    counts = {"records": count, "records cut short": cut} if cut else {"records": count}
    counts |= {f"{reason} skipped": number for reason, number in skipped.items()}
    name, how = f"{source}, {SPLITS[split]}", f"{type(task).__name__}, as in a run's own validation"
    return [Result(name, metric, value, None, counts, how) for metric, value in task.metrics(whole, notes).items()]
