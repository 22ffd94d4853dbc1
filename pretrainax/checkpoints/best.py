"""Selects the best checkpoint of a run by a validation metric."""

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
    """Returns the step with the best value of a metric, the first of equal values; None if no step has a value.

    Args:
      values: value of the metric at each step, in step order; None if the value is unknown.
      figure: name of the metric.
    """
    known = {step: value for step, value in values.items() if value is not None}
    best = max if larger_is_better(figure) else min
    return best(known, key=known.__getitem__) if known else None


def best_checkpoint(directory: str, figure: str) -> Optional[tuple[int, float, JsonObject]]:
    """Returns (step, value of the metric, all validation metrics) of the best checkpoint in a folder of checkpoints.

    Returns None if no checkpoint has a value of the metric.

    Args:
      directory: the folder `checkpoints` of a run.
      figure: name of the metric.
    """
    metrics: dict[int, JsonObject] = {}
    for step in list_steps(directory):
        with contextlib.suppress(UserError):  # an incomplete or damaged checkpoint has no known metrics
            metrics[step] = read_run_json(os.path.join(directory, str(step)))["metrics"]
    step = best_step({step: values.get(figure) for step, values in metrics.items()}, figure)
    return None if step is None else (step, metrics[step][figure], metrics[step])
