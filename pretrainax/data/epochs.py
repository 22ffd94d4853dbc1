"""Computes the number of steps of a run, its warmup and its intervals from the number of rows in an epoch.

`training.budget` does so for a budget in FLOPs or time.
"""

import math
from typing import TYPE_CHECKING

from pretrainax.config import AUTO, Experiment, UserError
from pretrainax.config.budget import RunBudget
from pretrainax.config.validation import epoch_problems, validate
from pretrainax.data.pipeline import batches_of

if TYPE_CHECKING:
    from pretrainax.data.preparation.prepare import Prepared


def resolve_steps(experiment: Experiment, prepared: "Prepared") -> None:
    """Replaces `train.steps` 0, the warmup "auto" and the intervals 0 by numbers of steps.

    `train.steps` becomes the epochs of `train.budget` times the rows of an epoch, divided by the batch size and rounded
    down; `train.budget` then becomes None. `evaluate.every` and `checkpoint.every` become the steps of one epoch,
    rounded up, but at most `train.steps`. The warmup becomes a tenth of `train.steps`. A config whose budget is in
    FLOPs or time stays unchanged.

    Args:
      experiment: the config; modified in place.
      prepared: the prepared data.

    Raises:
      UserError: the rows come from several sources or objectives, which have no common epoch, or the resulting config
        is invalid.
    """
    budget = experiment.train.budget and RunBudget.parse(experiment.train.budget)
    if budget and budget.unit != "epochs":
        return
    train, sections, schedule = experiment.train, (experiment.evaluate, experiment.checkpoint), experiment.schedule
    if not train.steps or not all(section.every for section in sections):
        if problems := list(epoch_problems(experiment)):  # the caller may not have validated the config
            raise UserError("; ".join(problems))
        epoch = batches_of(experiment, prepared, "train").rows_per_epoch / train.global_batch_size  # in steps
        if budget:
            train.steps, train.budget = max(int(round(budget.amount * epoch, 6)), 1), None
        for section in sections:
            section.every = section.every or min(math.ceil(epoch), train.steps)
    elif getattr(schedule, "warmup_steps", None) != AUTO:  # nothing is to be computed
        return
    schedule.warmup_steps = schedule.resolved_warmup(train.steps)
    validate(experiment, files=False)
