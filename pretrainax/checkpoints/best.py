"""Selects a run's best checkpoint by a validation metric."""

import contextlib
import os
from collections.abc import Mapping
from typing import Optional

from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.checkpoints.steps import list_steps
from pretrainax.config import UserError
from pretrainax.config.metric import larger_is_better
from pretrainax.files.json_files import JsonObject


def best_step(values: Mapping[int, Optional[float]], figure: str) -> Optional[int]:
    """Returns the step with a metric's best value (the first step if there are ties), or None if there are no values.

    Args:
      values: the metric's value at each step, in step order; None if the value is unknown.
      figure: name of the metric, which determines whether larger or smaller values are better.
    """
    known_values = {step: value for step, value in values.items() if value is not None}
    best = max if larger_is_better(figure) else min
    return best(known_values, key=known_values.__getitem__) if known_values else None


def best_of(runs: Mapping[int, JsonObject], figure: str) -> Optional[int]:
    """Returns the step with a metric's best value, or None if there are no values.

    Compares only validations with the same number of batches as the newest validation, because values of different rows
    are not comparable.

    Args:
      runs: {step: content of the checkpoint's run.json}.
      figure: as in `best_step`.
    """
    values = {step: run["metrics"].get(figure) for step, run in runs.items()}
    known_steps = [step for step, value in values.items() if value is not None]
    batches = {step: runs[step]["extra"].get("valid_batches") for step in known_steps}  # None: an older version saved
    newest = batches[max(known_steps)] if known_steps else None
    return best_step({step: values[step] for step in known_steps if batches[step] in (None, newest)}, figure)


def best_checkpoint(directory: str, figure: str) -> Optional[tuple[int, float, JsonObject]]:
    """Finds the checkpoint in a folder with the best value of a validation metric.

    Returns (step, value of the metric, all validation metrics), or None if no checkpoint has a value of the metric.

    Args:
      directory: a run's `checkpoints` folder.
      figure: name of the metric.
    """
    runs: dict[int, JsonObject] = {}
    for step in list_steps(directory):
        with contextlib.suppress(UserError):  # an incomplete or damaged checkpoint, whose metrics cannot be read
            runs[step] = read_run_json(os.path.join(directory, str(step)))
    step = best_of(runs, figure)
    return None if step is None else (step, runs[step]["metrics"][figure], runs[step]["metrics"])
