"""The figures of a task on a source of records: what the head of a model answers to each, beside their labels."""

import collections
import itertools
from typing import Optional

import jax
import numpy as np

from pretrainax.config import Experiment, UserError
from pretrainax.data.sources import Source
from pretrainax.data.sources.base import Record
from pretrainax.inference.answers import answer, task_of
from pretrainax.inference.loaded import LoadedModel
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
    """Returns the figures of a task on a source, as a validation has them; without the loss.

    Args:
      experiment: whose objective is the task, and whose rows are read.
      split: "valid", "train", or "all": both.
      records: at most so many, the first ones; None: all.
      watch: sees them go by.

    Raises:
      UserError: no head of a task, no record there, or a broken one.
    """
    task, skipped, cut = task_of(loaded, experiment), collections.Counter(), 0
    found = watch(itertools.islice(documents_of(source.reading(task), split, skipped), records))
    answers, notes, count = [], [], 0
    of_task = (record for record in found if isinstance(record, Record) and not task.leaves_out(record))
    for each in answer(loaded, task, of_task, even=True):
        answers.append(each.answers)
        notes += each.notes
        count, cut = count + 1, cut + each.is_cut
    if not count:
        seen = "".join(f", {number:,} {reason}" for reason, number in skipped.items() if number)
        raise UserError(f"{source} holds no record ({SPLITS[split]}{seen}); --split={'|'.join(SPLITS)} says which part")
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *answers)
    counts = {"records": count, "records cut short": cut} if cut else {"records": count}
    counts |= {f"{reason} skipped": number for reason, number in skipped.items()}
    name, how = f"{source}, {SPLITS[split]}", f"{type(task).__name__}, as in a run's own validation"
    return [Result(name, figure, value, None, counts, how) for figure, value in task.metrics(whole, notes).items()]
