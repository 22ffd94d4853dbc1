"""Computes the number of steps of a run, its warmup and its intervals from the number of rows in an epoch."""

import math
from typing import TYPE_CHECKING

from pretrainax.config import AUTO, Experiment, UserError
from pretrainax.config.validation import validate
from pretrainax.data.pipeline import batches_of

if TYPE_CHECKING:
    from pretrainax.data.preparation.prepare import Prepared


def resolve_steps(experiment: Experiment, prepared: "Prepared") -> None:
    """Replaces `train.steps` 0, the warmup "auto" and the intervals 0 by numbers of steps.

    `train.steps` becomes `train.epochs` times the rows of an epoch, divided by the batch size and rounded down;
    `train.epochs` then becomes None. `evaluate.every` and `checkpoint.every` become the steps of one epoch, rounded up,
    but at most `train.steps`. The warmup becomes a tenth of `train.steps`.

    Args:
      experiment: the config; modified in place.
      prepared: the prepared data.

    Raises:
      UserError: the rows come from several sources or objectives, which have no common epoch, or the resulting config
        is invalid.
    """
    train, sections, schedule = experiment.train, (experiment.evaluate, experiment.checkpoint), experiment.schedule
    if not train.steps or not all(section.every for section in sections):
        batches = batches_of(experiment, prepared, "train")
        if len(batches.streams) > 1:
            raise UserError(
                "config.train.epochs, and evaluate.every or checkpoint.every 0, need an epoch, but config.data.source "
                "and config.objective mix several streams of rows: set config.train.steps and both intervals"
            )
        epoch = batches.rows_per_epoch / train.global_batch_size  # in steps
        if train.epochs is not None:
            train.steps, train.epochs = max(int(round(train.epochs * epoch, 6)), 1), None
        for section in sections:
            section.every = section.every or min(math.ceil(epoch), train.steps)
    elif getattr(schedule, "warmup_steps", None) != AUTO:  # nothing is to be computed
        return
    schedule.warmup_steps = schedule.resolved_warmup(train.steps)
    validate(experiment, files=False)
