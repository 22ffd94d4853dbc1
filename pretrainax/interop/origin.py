"""Finds the parameters that a user names: a run's newest checkpoint, another one of them, or a Hugging Face directory.

    runs/mine            the newest checkpoint that verifies: of its parameters those that the run validates, which are
                         their moving average with config.evaluate.parameters=ema
    runs/mine@2000       that of step 2000
    runs/mine@best       the one with the best validation of those that are kept, by the figure that the run selects by
    runs/mine@average    the mean of the parameters of the last ones that are kept and verify: not of those that are
                         there for config.checkpoint.keep_at alone, nor of the best where that is long ago
    runs/mine@average5   that of the newest 5 of them
    runs/mine@ema        the moving average that the newest has beside its parameters (config.train.ema_decay);
                         @ema2000 that of step 2000
    runs/mine@trained    the parameters as they were trained, whatever the run validates; @trained2000 of step 2000
    exports/mine         a Hugging Face directory: an export, or a model of others
    hf:org/name          a model of the Hugging Face Hub; hf:org/name@refs/pr/1 that of a branch, a tag or a commit

A folder whose own name has an @ is taken by its whole name.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Optional

from absl import logging

from pretrainax.checkpoints.best import best_checkpoint
from pretrainax.checkpoints.params import EMA, TRAINED
from pretrainax.checkpoints.run_json import read_run_json
from pretrainax.checkpoints.steps import (
    faults,
    find_checkpoint,
    last_steps,
    list_steps,
    not_used,
    of_parameters,
    step_of,
)
from pretrainax.config import UserError, load
from pretrainax.files.paths import is_hub, path_problem
from pretrainax.interop.architectures import is_huggingface_directory, read_config_json
from pretrainax.storage.hub import exact_name
from pretrainax.storage.places import here, named

BEST, AVERAGE, AS_TRAINED = "best", "average", "trained"
NAMES = (
    f"A run, RUN@2000, RUN@{BEST}, RUN@{AVERAGE}5, RUN@{EMA}, RUN@{AS_TRAINED}, a Hugging Face directory, or "
    "hf:org/name[@revision]"
)
_WHICH = re.compile(rf"{BEST}|({AVERAGE}|{EMA}|{AS_TRAINED})?([0-9]*)")  # what may stand after an @, or nothing


@dataclasses.dataclass(frozen=True)
class Origin:
    """Holds where parameters are read from."""

    directory: str  # of a run, or in the layout of Hugging Face
    steps: tuple[str, ...]  # the folder of a checkpoint of the run, or of those that are averaged; () for Hugging Face
    description: str  # for people: "runs/mine, step 2,000"
    folder: str = TRAINED  # of each checkpoint: the parameters as they were trained, or their moving average
    hub: Optional[str] = None  # of a model of the hub: its name with the commit, hf:org/name@1a2b…


def find_origin(name: str) -> Origin:
    """Returns what `name` stands for, as the docstring of this module says.

    Raises:
      UserError: nothing is there, or something else; the checkpoint is not there, or damaged; none has a validation
        loss.
    """
    found = _found(name)
    return dataclasses.replace(found, description=named(found.description))


def _found(name: str) -> Origin:
    if problem := path_problem(name, takes_hub=True):
        raise UserError(f"{name}: {problem}")
    if is_hub(name):
        directory, exact = here(name), exact_name(name)
        commit = "" if name == exact else f" (commit {exact.rpartition('@')[2][:12]})"
        return Origin(directory, (), f"{name}{commit}", hub=exact)
    directory, which = parted(here(os.path.expanduser(name)))
    if is_huggingface_directory(directory):
        if which:
            raise UserError(f"{directory} is a Hugging Face directory, which has no checkpoints: leave out @{which}")
        return Origin(directory, (), directory)
    _check_run(directory)
    if which == BEST:
        return _best(directory)
    match = _WHICH.fullmatch(which)
    assert match is not None  # `parted` has refused others
    kind, number = match[1], int(match[2]) if match[2] else None
    if kind == AVERAGE:
        return _average(directory, number)
    parameters = kind or load(os.path.join(directory, "config.json")).evaluate.parameters
    checkpoint = find_checkpoint(directory, number, _needed(parameters))
    return _of_step(directory, checkpoint, f"{directory}, step {step_of(checkpoint):,}", parameters)


def parted(name: str) -> tuple[str, str]:
    """Returns the folder, and what is said of its checkpoints; the second is empty for a folder of the whole name.

    Of a model of the hub what follows an @ is a revision, and a part of its name.
    """
    if is_hub(name):
        return name, ""
    directory, at, which = name.rstrip(os.sep).rpartition("@")
    if os.path.isdir(name) or not (at and os.path.isdir(directory)):
        return name, ""
    if not which or not _WHICH.fullmatch(which):
        raise UserError(
            f"{name}: after @ comes a step, {BEST}, {AVERAGE} (of all, or {AVERAGE}5: of 5), {EMA} or "
            f"{AS_TRAINED}, as {directory}@{BEST}; got {which!r}"
        )
    return directory, which


def _check_run(directory: str) -> None:
    """Raises a UserError for what is no folder of a run; what it may be else is looked at before."""
    if not os.path.isdir(directory):
        read_config_json(directory)  # which says what may be meant
    if all(os.path.exists(os.path.join(directory, name)) for name in ("config.json", "checkpoints")):
        return
    folder, step = os.path.split(os.path.abspath(directory))
    if os.path.basename(folder) == "checkpoints" and step.isdecimal():
        raise UserError(f"{directory} is a checkpoint of a run: give {os.path.dirname(folder)}@{step}")
    names = sorted(os.listdir(directory))
    there = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise UserError(
        f"{directory} is neither a run, which has config.json and checkpoints/, nor a Hugging Face directory, whose "
        f"config.json has a model_type; there is: {there or 'nothing'}"
    )


def _best(workdir: str) -> Origin:
    experiment, directory = load(os.path.join(workdir, "config.json")), os.path.join(workdir, "checkpoints")
    parameters = experiment.evaluate.parameters
    for figure in (experiment.select_by, "loss"):  # before version 0.5 checkpoints had no other
        while best := best_checkpoint(directory, figure):
            step, value, _ = best
            try:
                checkpoint = find_checkpoint(workdir, step, _needed(parameters))
            except UserError:
                if best_checkpoint(directory, figure) == best:  # else its run has deleted it since
                    raise
                continue
            description = f"{workdir}, step {step:,}, the best by validation {figure}: {value:.4f}"
            return _of_step(workdir, checkpoint, description, parameters)
    raise UserError(
        f"{workdir}@{BEST}: no checkpoint there has a validation loss, so none is the best: give {workdir} for the "
        "newest; config.evaluate.every says how often a run validates"
    )


def _needed(parameters: str) -> Callable[[str], bool]:
    """Returns what tells whether a file of a checkpoint is read; parameters: AS_TRAINED or EMA."""
    return of_parameters(EMA if parameters == EMA else TRAINED)


def _of_step(workdir: str, checkpoint: str, description: str, parameters: str) -> Origin:
    """parameters: AS_TRAINED or EMA."""
    if parameters == AS_TRAINED:
        return Origin(workdir, (checkpoint,), description)
    if not any(name.startswith(f"{EMA}/") for name in read_run_json(checkpoint)["arrays"]):
        raise UserError(
            f"{workdir}@{EMA}: the run keeps no moving average of its parameters, for which config.train.ema_decay is "
            f"set before it starts; {workdir}@{AVERAGE} is the mean of its checkpoints"
        )
    return Origin(workdir, (checkpoint,), f"{description}, moving average of the parameters", EMA)


def _average(workdir: str, newest: Optional[int] = None) -> Origin:
    directory = os.path.abspath(os.path.join(workdir, "checkpoints"))
    found = {step: faults(directory, step, _needed(AS_TRAINED)) for step in list_steps(directory)}
    valid = [step for step, problems in found.items() if not problems]
    if not valid:
        find_checkpoint(workdir)  # which says why there is none
    steps = last_steps(valid, load(os.path.join(workdir, "config.json")).checkpoint)
    if newest is not None and not 0 < newest <= len(steps):
        raise UserError(
            f"{workdir}@{AVERAGE}{newest} is of {newest} checkpoints, and of the last ones there {len(steps)} verify: "
            "give a number up to that; config.checkpoint.keep says how many a run keeps, beside those of keep_at and "
            "the best"
        )
    if newest is None and (early := [f"{step:,}" for step in valid if step not in steps]):
        logging.warning("%s: not of the last, and no part of the mean: steps %s", workdir, ", ".join(early))
    steps = steps[-newest:] if newest else steps
    for line in not_used(directory, {step: ", ".join(problems) for step, problems in found.items() if problems}):
        logging.warning("%s: %s", workdir, line)
    named = f"steps {', '.join(f'{step:,}' for step in steps)}" if len(steps) > 1 else f"the one step {steps[0]:,}"
    return Origin(workdir, tuple(os.path.join(directory, str(step)) for step in steps), f"{workdir}, mean of {named}")
