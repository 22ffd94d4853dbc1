"""The folders of a run's checkpoints: which steps there are, and the newest that can be trusted."""

import os
from typing import Optional

from absl import logging

from pretrainax.checkpoints import manifest
from pretrainax.config import UserError


def list_steps(directory: str) -> list[int]:
    """Returns the steps in a folder of checkpoints, in their order, whether they can be trusted or not."""
    return sorted(int(name) for name in os.listdir(directory) if name.isdecimal())


def newest_valid_step(directory: str, up_to: Optional[int] = None) -> tuple[Optional[int], dict[int, str]]:
    """Returns the newest step that verifies, and what is wrong with each newer one; None where there is no step.

    With `up_to`, the newest up to that step, or the oldest after it.

    Raises:
      UserError: there are steps, and none of them verifies.
    """
    damaged, steps = {}, list_steps(directory)[::-1]
    if up_to is not None:
        steps.sort(key=lambda step: (step > up_to, abs(step - up_to)))
    for step in steps:
        faults = manifest.faults(os.path.join(directory, str(step)))
        if not faults:
            return step, damaged
        damaged[step] = ", ".join(faults)
    if damaged:
        lines = "; ".join(f"step {step}: {faults}" for step, faults in damaged.items())
        raise UserError(
            f"every checkpoint in {directory} is damaged ({lines}); none was deleted: repair or move that folder away"
        )
    return None, {}


def find_checkpoint(workdir: str, step: Optional[int] = None) -> str:
    """Returns the folder of the newest valid checkpoint of a run, or of `step`; UserError where there is none."""
    directory = os.path.abspath(os.path.join(workdir, "checkpoints"))
    if step is not None:
        path = os.path.join(directory, str(step))
        faults = manifest.faults(path) if os.path.isdir(path) else ["it is not there"]
        if faults:
            raise UserError(f"checkpoint {step} of {workdir} cannot be used: {', '.join(faults)}")
        return path
    step, damaged = newest_valid_step(directory) if os.path.isdir(directory) else (None, {})
    if step is None:
        raise UserError(f"{workdir} holds no checkpoint; it must be the --workdir of a run that has saved one")
    for other, faults in damaged.items():
        logging.warning("checkpoint %d of %s is not used: %s", other, workdir, faults)
    return os.path.join(directory, str(step))
