"""The folders of a run's checkpoints: which steps there are, and the newest that can be trusted."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Optional

from absl import logging

from pretrainax.checkpoints import manifest
from pretrainax.config import RunFailed, UserError
from pretrainax.config.json_files import read_object

NOTES = "run.json"


def newest_step(workdir: str, step: Optional[int] = None) -> str:
    """The folder of the newest valid checkpoint of a run, or of `step`; UserError where there is none."""
    directory = os.path.abspath(os.path.join(workdir, "checkpoints"))
    if step is not None:
        path = os.path.join(directory, str(step))
        faults = manifest.faults(path) if os.path.isdir(path) else ["it is not there"]
        if faults:
            raise UserError(f"checkpoint {step} of {workdir} cannot be used: {', '.join(faults)}")
        return path
    step, damaged = newest_valid(directory) if os.path.isdir(directory) else (None, {})
    if step is None:
        raise UserError(f"{workdir} holds no checkpoint; it must be the --workdir of a run that has saved one")
    for other, faults in damaged.items():
        logging.warning("checkpoint %d of %s is not used: %s", other, workdir, faults)
    return os.path.join(directory, str(step))


def steps_in(directory: str) -> list[int]:
    return sorted(int(name) for name in os.listdir(directory) if name.isdecimal())


def newest_valid(directory: str, up_to: Optional[int] = None) -> tuple[Optional[int], dict[int, str]]:
    """The newest step that verifies, and what is wrong with each newer one; UserError where none of them does.

    With `up_to`, the newest up to that step, or the oldest after it.
    """
    damaged, steps = {}, steps_in(directory)[::-1]
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


@contextlib.contextmanager
def named_errors(step: int) -> Iterator[None]:
    """Whatever stops a save (disk, permissions, Orbax, TensorStore) becomes one line; `--debug` shows the cause."""
    try:
        yield
    except Exception as error:
        raise RunFailed(f"could not save step {step}: {_reason(error)}; earlier checkpoints are kept") from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if match := re.search(r"os_error_code='(\d+)'", text):  # TensorStore's way of giving errno
        return os.strerror(int(match[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {text[:200]}"


def read_notes(step_directory: str) -> dict:
    path = os.path.join(step_directory, NOTES)
    notes = read_object(path)
    if lost := [name for name in ("arrays", "metrics", "extra") if not isinstance(notes.get(name), dict)]:
        raise UserError(f"{path} is not what a checkpoint has: no {', '.join(lost)}")
    return notes
