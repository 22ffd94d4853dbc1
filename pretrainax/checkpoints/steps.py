"""The folders of a run's checkpoints: which steps there are, and the newest that can be trusted."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Optional

from absl import logging

from pretrainax.checkpoints import manifest
from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.config import CheckpointConfig, UserError
from pretrainax.storage.places import complete, refresh
from pretrainax.storage.twin import Gone

UNFINISHED = re.compile(r"(\d+)\.(saving|replaced|deleted)\b.*")  # folders on their way to or from `<step>`


def of_parameters(*folders: str) -> Callable[[str], bool]:
    """Returns what tells whether a file of a step is needed to read these folders of it, and no optimizer's state."""
    return lambda name: "/" not in name or name.partition("/")[0] in folders


def list_steps(directory: str) -> list[int]:
    """Returns the steps in a folder of checkpoints, in their order, whether they can be trusted or not."""
    return sorted(int(name) for name in os.listdir(directory) if _is_step(name))


def step_of(folder: str) -> int:
    """Returns the updates after which the checkpoint of a folder was made."""
    return int(os.path.basename(folder))


def last_steps(steps: Sequence[int], saving: CheckpointConfig) -> list[int]:
    """Returns those of the steps of checkpoints that a mean of the last ones is of.

    They are as near to the newest as those that `saving.keep` keeps, so not the best of long ago; those that are there
    for `saving.keep_at` alone are none of them.
    """
    newest = max(steps, default=0)

    def is_one(step: int) -> bool:
        is_regular = step > 0 and step % saving.every == 0 or not saving.keeps(step)
        return step == newest or is_regular and step > newest - saving.every * saving.keep

    return list(filter(is_one, steps))


def misnamed(directory: str) -> list[str]:
    """Returns the folders that hold a checkpoint and whose names are no step: `0038`, `38 (copy)`, `step_38`."""
    names = [name for name in os.listdir(directory) if not _is_step(name) and not UNFINISHED.fullmatch(name)]
    paths = {name: os.path.join(directory, name) for name in names if not name.startswith(".")}
    return sorted(
        n for n, p in paths.items() if os.path.exists(os.path.join(p, manifest.MANIFEST)) and not os.path.islink(p)
    )


def faults(directory: str, step: int, needed: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Lists what is wrong with the folder of a step: its files, or that it was made as another step.

    A run in an object store may delete the step while it is fetched; the folder then has the steps of now.

    needed: tells of a file, by its name in the folder, whether it is fetched and verified.
    """
    path = os.path.join(directory, str(step))
    try:
        complete(path, needed)
    except Gone as e:
        refresh(directory)
        return [str(e)]
    if found := manifest.faults(path, needed):
        return found
    made = read_run_json(path).get("step")
    return [] if made == step else [f"it was saved as step {made}: name its folder {made} again"]


def _is_step(name: str) -> bool:
    return name.isdecimal() and name == str(int(name))  # not 0038, and no digits of other scripts


def newest_valid_step(
    directory: str, up_to: Optional[int] = None, needed: Callable[[str], bool] = lambda name: True
) -> tuple[Optional[int], dict[int, str]]:
    """Returns the newest step that verifies, and what is wrong with each newer one; None where there is no step.

    With `up_to`, the newest up to that step, or the oldest after it.

    needed: as `faults`.

    Raises:
      UserError: there are steps, and none of them verifies.
    """
    damaged: dict[int, str] = {}
    while untried := [step for step in in_order(directory, up_to) if step not in damaged]:
        found = faults(directory, untried[0], needed)
        if not found:
            return untried[0], _still_there(directory, damaged)
        damaged[untried[0]] = ", ".join(found)
    check_none_is_left(directory, _still_there(directory, damaged))
    return None, {}


def _still_there(directory: str, damaged: dict[int, str]) -> dict[int, str]:
    """Returns the steps that no run has deleted since."""
    steps = set(list_steps(directory))
    return {step: found for step, found in damaged.items() if step in steps}


def in_order(directory: str, up_to: Optional[int] = None) -> list[int]:
    """Returns the steps in the order in which they are tried: as `newest_valid_step`."""
    steps = list_steps(directory)[::-1]
    return steps if up_to is None else sorted(steps, key=lambda step: (step > up_to, abs(step - up_to)))


def check_none_is_left(directory: str, damaged: dict[int, str]) -> None:
    """Raises UserError where there are steps, and none of them verifies; damaged: what is wrong with each."""
    if damaged:
        lines = "; ".join(f"step {step}: {found}" for step, found in damaged.items())
        raise UserError(
            f"every checkpoint in {directory} is damaged ({lines}); none was deleted: repair or move that folder away"
        )
    if strange := misnamed(directory):
        raise UserError(
            f"no checkpoint in {directory} is named by its step and nothing else: rename "
            f"{', '.join(map(repr, strange))} to go on from there, or move away what is there"
        )


def _nearest_valid_step(directory: str, step: int, needed: Callable[[str], bool]) -> Optional[int]:
    """Returns the step nearest to one that is not there, or is damaged, of those that verify; None where none does."""
    steps = list_steps(directory) if os.path.isdir(directory) else []
    others = sorted((other for other in steps if other != step), key=lambda other: abs(other - step))
    return next((other for other in others if not faults(directory, other, needed)), None)


def not_used(directory: str, damaged: dict[int, str]) -> list[str]:
    """Returns a line for each checkpoint that is passed over: those of `newest_valid_step`, and those misnamed."""
    return [f"checkpoint {step} is not used: {found}" for step, found in damaged.items()] + [
        f"checkpoint {name!r} is not used: a folder's name must be its step and nothing else"
        for name in misnamed(directory)
    ]


def find_checkpoint(workdir: str, step: Optional[int] = None, needed: Callable[[str], bool] = lambda name: True) -> str:
    """Returns the folder of the newest valid checkpoint of a run, or of `step`; UserError where there is none.

    needed: tells of a file of the checkpoint, by its name, whether it is fetched and verified.
    """
    directory = os.path.abspath(os.path.join(workdir, "checkpoints"))
    if step is not None:
        path = os.path.join(directory, str(step))
        found = faults(directory, step, needed) if os.path.isdir(path) else ["it is not there"]
        if found:
            other = _nearest_valid_step(directory, step, needed)
            instead = "no other verifies"
            if other is not None:
                instead = f"the nearest that verifies is {workdir}@{other}, of an export --step={other}"
            raise UserError(f"checkpoint {step} of {workdir} cannot be used: {', '.join(found)}; {instead}")
        return path
    step, damaged = newest_valid_step(directory, needed=needed) if os.path.isdir(directory) else (None, {})
    if step is None:
        raise UserError(f"{workdir} holds no checkpoint; it must be the --workdir of a run that has saved one")
    for line in not_used(directory, damaged):
        logging.warning("%s: %s", workdir, line)
    return os.path.join(directory, str(step))
