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
    """Returns the step with a metric's best value (the first one if there are ties), or None if there are no values.

    Args:
      values: the metric's value at each step, in step order; None if the value is unknown.
      figure: name of the metric, which determines whether larger or smaller values are better.
    """
    known_values = {step: value for step, value in values.items() if value is not None}
    best = max if larger_is_better(figure) else min
    return best(known_values, key=known_values.__getitem__) if known_values else None


def best_checkpoint(directory: str, figure: str) -> Optional[tuple[int, float, JsonObject]]:
    """Finds the checkpoint in a folder with the best value of a validation metric.

    Returns (step, value of the metric, all validation metrics), or None if no checkpoint has a value of the metric.

    Args:
      directory: a run's `checkpoints` folder.
      figure: name of the metric.
    """
    metrics: dict[int, JsonObject] = {}
    for step in list_steps(directory):
        with contextlib.suppress(UserError):  # the metrics of an incomplete or damaged checkpoint are unknown
            metrics[step] = read_run_json(os.path.join(directory, str(step)))["metrics"]
    step = best_step({step: values.get(figure) for step, values in metrics.items()}, figure)
    return None if step is None else (step, metrics[step][figure], metrics[step])
