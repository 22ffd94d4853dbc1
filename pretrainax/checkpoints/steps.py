"""Lists the checkpoints of a run, verifies them, and finds the newest valid checkpoint.

The folder `checkpoints/` of a run contains one folder per checkpoint. The name of this folder is the step: the number
of updates before the checkpoint.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import Optional

from absl import logging

from pretrainax.checkpoints import manifest
from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.config import CheckpointConfig, UserError
from pretrainax.storage.mirror import ObjectDeleted
from pretrainax.storage.places import complete, refresh

UNFINISHED = re.compile(r"(\d+)\.(saving|replaced|deleted)\b.*")  # temporary names of a checkpoint folder


def parameter_files(*folders: str) -> Callable[[str], bool]:
    """Returns a predicate that accepts a checkpoint's top-level files and the files in the given folders.

    The predicate takes a file path relative to the checkpoint folder.
    """
    return lambda name: "/" not in name or name.partition("/")[0] in folders


def list_steps(directory: str) -> list[int]:
    """Lists the sorted steps of all checkpoints in a run's `checkpoints` folder, including damaged checkpoints."""
    return sorted(int(name) for name in os.listdir(directory) if _is_step(name))


def has_checkpoints(directory: str) -> bool:
    """Checks whether a run's `checkpoints` folder has a checkpoint, which may be damaged, misnamed or replaced."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    incomplete = re.compile(r"\.|\d+\.(saving|deleted)\b")
    return any(incomplete.match(name) is None for name in names)


def step_of(folder: str) -> int:
    """Parses the step (the number of updates before the checkpoint) from the path of a checkpoint folder."""
    return int(os.path.basename(folder))


def last_steps(steps: Sequence[int], saving: CheckpointConfig) -> list[int]:
    """Selects the checkpoints recent enough to be averaged (`config.evaluate.average`).

    These are the checkpoints that the run keeps because of `saving.keep`. An older best checkpoint and checkpoints
    that exist only because of `saving.keep_at` are excluded.

    Args:
      steps: steps of all the run's checkpoints.
      saving: the checkpoint config of the run.
    """
    newest = max(steps, default=0)

    def is_recent(step: int) -> bool:
        is_regular = step > 0 and step % saving.every == 0 or not saving.keeps(step)
        return step == newest or is_regular and step > newest - saving.every * saving.keep

    return list(filter(is_recent, steps))


def misnamed(directory: str) -> list[str]:
    """Lists folders that contain a checkpoint, but whose names are not a step: `0038`, `38 (copy)`."""
    names = [name for name in os.listdir(directory) if not _is_step(name) and not UNFINISHED.fullmatch(name)]
    paths = {name: os.path.join(directory, name) for name in names if not name.startswith(".")}
    return sorted(
        n for n, p in paths.items() if os.path.exists(os.path.join(p, manifest.MANIFEST)) and not os.path.islink(p)
    )


def faults(directory: str, step: int, needed: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Verifies a checkpoint; returns one line per fault, or [] if the checkpoint is valid.

    A fault is a damaged or missing file, or a folder name that differs from the saved step. With an object store,
    missing files are downloaded first. If a run deletes the checkpoint in the meantime, the result is a single line,
    and the local folder is updated to the current checkpoints.

    Args:
      directory: the folder `checkpoints` of the run.
      step: step of the checkpoint.
      needed: returns True for the files to download and verify, given a file path relative to the checkpoint folder.
    """
    path = os.path.join(directory, str(step))
    try:
        complete(path, needed)
    except ObjectDeleted as e:
        refresh(directory)
        return [str(e)]
    if problems := manifest.faults(path, needed):
        return problems
    saved_step = read_run_json(path).get("step")
    return [] if saved_step == step else [f"it was saved as step {saved_step}: rename its folder to {saved_step}"]


def _is_step(name: str) -> bool:
    return name.isdecimal() and name == str(int(name))  # False for 0038, and for digits that are not ASCII


def newest_valid_step(
    directory: str, up_to: Optional[int] = None, needed: Callable[[str], bool] = lambda name: True
) -> tuple[Optional[int], dict[int, str]]:
    """Returns the newest valid step and {step: faults} of newer damaged steps, or (None, {}) if no checkpoint exists.

    Args:
      directory: the folder `checkpoints` of the run.
      up_to: selects the newest valid step that is at most `up_to`, or else the oldest valid step after it. If None,
        selects the newest valid step.
      needed: returns True for the files to download and verify, as in `faults`.

    Raises:
      UserError: there are checkpoints, and all of them are damaged.
    """
    damaged: dict[int, str] = {}
    while untried := [step for step in candidates(directory, up_to) if step not in damaged]:
        problems = faults(directory, untried[0], needed)
        if not problems:
            return untried[0], _existing_faults(directory, damaged)
        damaged[untried[0]] = ", ".join(problems)
    check_any_valid(directory, _existing_faults(directory, damaged))
    return None, {}


def _existing_faults(directory: str, damaged: dict[int, str]) -> dict[int, str]:
    """Keeps the faults of checkpoints that still exist; a run may have deleted other checkpoints in the meantime."""
    steps = set(list_steps(directory))
    return {step: problem for step, problem in damaged.items() if step in steps}


def candidates(directory: str, up_to: Optional[int] = None) -> list[int]:
    """Lists all steps in the order in which `newest_valid_step` verifies their checkpoints."""
    steps = list_steps(directory)[::-1]
    return steps if up_to is None else sorted(steps, key=lambda step: (step > up_to, abs(step - up_to)))


def check_any_valid(directory: str, damaged: dict[int, str]) -> None:
    """Raises UserError if there are damaged or misnamed checkpoints; call this if no checkpoint is valid.

    Args:
      damaged: {step: faults} of each damaged checkpoint.
    """
    if damaged:
        lines = "; ".join(f"step {step}: {problem}" for step, problem in damaged.items())
        raise UserError(
            f"every checkpoint in {directory} is damaged ({lines}); none was deleted: repair or move away the folder"
        )
    if misnamed_folders := misnamed(directory):
        raise UserError(
            f"no checkpoint in {directory} is named by its step and nothing else: rename "
            f"{', '.join(map(repr, misnamed_folders))} to continue from there, or move these folders away"
        )


def _nearest_valid_step(directory: str, step: int, needed: Callable[[str], bool]) -> Optional[int]:
    """Returns the valid step nearest to a missing or damaged step, or None if no checkpoint is valid."""
    steps = list_steps(directory) if os.path.isdir(directory) else []
    others = sorted((other for other in steps if other != step), key=lambda other: abs(other - step))
    return next((other for other in others if not faults(directory, other, needed)), None)


def skipped_messages(directory: str, damaged: dict[int, str]) -> list[str]:
    """Formats a message for each damaged checkpoint that `newest_valid_step` skipped, and each misnamed folder."""
    return [f"checkpoint {step} is not used: {problem}" for step, problem in damaged.items()] + [
        f"checkpoint {name!r} is not used: a folder's name must be its step and nothing else"
        for name in misnamed(directory)
    ]


def find_checkpoint(workdir: str, step: Optional[int] = None, needed: Callable[[str], bool] = lambda name: True) -> str:
    """Finds a valid checkpoint of a run and returns the path of its folder.

    Args:
      workdir: folder of the run.
      step: step of the checkpoint. If None, selects the newest valid checkpoint.
      needed: returns True for the files to download and verify, as in `faults`.

    Raises:
      UserError: the run has no checkpoint, all are damaged, or the checkpoint of `step` is missing or damaged.
    """
    directory = os.path.abspath(os.path.join(workdir, "checkpoints"))
    if step is not None:
        path = os.path.join(directory, str(step))
        problems = faults(directory, step, needed) if os.path.isdir(path) else ["it does not exist"]
        if problems:
            nearest_step = _nearest_valid_step(directory, step, needed)
            suggestion = "no other checkpoint is valid"
            if nearest_step is not None:
                suggestion = f"the nearest valid one is {workdir}@{nearest_step} (for an export: --step={nearest_step})"
            raise UserError(f"checkpoint {step} of {workdir} cannot be used: {', '.join(problems)}; {suggestion}")
        return path
    step, damaged = newest_valid_step(directory, needed=needed) if os.path.isdir(directory) else (None, {})
    if step is None:
        raise UserError(f"{workdir} has no checkpoint; it must be the --workdir of a run that has saved one")
    for line in skipped_messages(directory, damaged):
        logging.warning("%s: %s", workdir, line)
    return os.path.join(directory, str(step))
