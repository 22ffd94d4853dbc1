"""Says which value of a figure of the validation is the better one, and so which checkpoint of a run is the best."""

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
    """Returns the first step with the best value of a figure; None where no step has one.

    values: of the steps, in their order; None: not known.
    """
    known = {step: value for step, value in values.items() if value is not None}
    best = max if larger_is_better(figure) else min
    return best(known, key=known.__getitem__) if known else None


def best_checkpoint(directory: str, figure: str) -> Optional[tuple[int, float, JsonObject]]:
    """Returns the step with the best value of a figure, of the checkpoints in a folder, that value, and all figures of
    its validation; None where none has it."""
    metrics: dict[int, JsonObject] = {}
    for step in list_steps(directory):
        with contextlib.suppress(UserError):  # of no checkpoint, or damaged: its figures are not known
            metrics[step] = read_run_json(os.path.join(directory, str(step)))["metrics"]
    step = best_step({step: of_step.get(figure) for step, of_step in metrics.items()}, figure)
    return None if step is None else (step, metrics[step][figure], metrics[step])
