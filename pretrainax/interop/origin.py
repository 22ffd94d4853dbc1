"""Resolves the name of a trained model to parameters: of a checkpoint, a mean of checkpoints, or a Hugging Face model.

    runs/mine            the newest checkpoint that verifies, with the parameters that the run validates: the moving
                         average with config.evaluate.parameters=ema, otherwise the trained parameters
    runs/mine@2000       the checkpoint of step 2000
    runs/mine@best       the saved checkpoint with the best validation result, by the metric that the run
                         selects by (config.evaluate.select_by)
    runs/mine@average    the mean of the parameters of the last saved checkpoints that verify; without checkpoints that
                         are kept only because of config.checkpoint.keep_at, and without the best one if it is old
    runs/mine@average5   the mean of the newest 5 of these checkpoints
    runs/mine@ema        the moving average in the newest checkpoint (config.train.ema_decay); @ema2000 for step 2000
    runs/mine@trained    the trained parameters, whatever parameters the run validates; @trained2000 for step 2000
    exports/mine         a Hugging Face directory: an export, or another model
    hf:org/name          a model of the Hugging Face Hub; hf:org/name@refs/pr/1 is a branch, a tag or a commit

If a folder has a name with an @, the complete name is the folder.
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
    parameter_files,
    skipped_messages,
    step_of,
)
from pretrainax.config import UserError, load
from pretrainax.files.paths import is_hub, path_problem
from pretrainax.interop.architectures import is_huggingface_directory, read_config_json
from pretrainax.storage.hub import pinned_name
from pretrainax.storage.places import local_path, with_urls

BEST, AVERAGE, AS_TRAINED = "best", "average", "trained"
NAMES = (
    f"A run, RUN@2000, RUN@{BEST}, RUN@{AVERAGE}5, RUN@{EMA}, RUN@{AS_TRAINED}, a Hugging Face directory, or "
    "hf:org/name[@revision]"
)
_WHICH = re.compile(rf"{BEST}|({AVERAGE}|{EMA}|{AS_TRAINED})?([0-9]*)")  # selector after the @; may be empty


@dataclasses.dataclass(frozen=True)
class Origin:
    """The location of the parameters of a trained model."""

    directory: str  # a run or a Hugging Face directory
    steps: tuple[str, ...]  # folder of a checkpoint, or folders of checkpoints to average; (): Hugging Face directory
    description: str  # description for messages: "runs/mine, step 2,000"
    folder: str = TRAINED  # folder in each checkpoint: TRAINED parameters, or EMA (moving average)
    hub: Optional[str] = None  # name of a hub model with its commit, hf:org/name@1a2b…; None: no hub model


def find_origin(name: str) -> Origin:
    """Resolves `name` to the location of its parameters. The module docstring describes the syntax of `name`.

    Raises:
      UserError: the path does not exist or contains no model, the checkpoint is missing or damaged, or @best is given
        and no checkpoint has a validation result.
    """
    resolved = _resolved(name)
    return dataclasses.replace(resolved, description=with_urls(resolved.description))


def _resolved(name: str) -> Origin:
    if problem := path_problem(name, takes_hub=True):
        raise UserError(f"{name}: {problem}")
    if is_hub(name):
        directory, exact = local_path(name), pinned_name(name)
        commit = "" if name == exact else f" (commit {exact.rpartition('@')[2][:12]})"
        return Origin(directory, (), f"{name}{commit}", hub=exact)
    directory, which = split_selector(local_path(os.path.expanduser(name)))
    if is_huggingface_directory(directory):
        if which:
            raise UserError(f"{directory} is a Hugging Face directory, which has no checkpoints: leave out @{which}")
        return Origin(directory, (), directory)
    _check_run(directory)
    if which == BEST:
        return _best(directory)
    match = _WHICH.fullmatch(which)
    assert match is not None  # `split_selector` raises UserError for unknown selectors
    kind, number = match[1], int(match[2]) if match[2] else None
    if kind == AVERAGE:
        return _average(directory, number)
    parameters = kind or load(os.path.join(directory, "config.json")).evaluate.parameters
    checkpoint = find_checkpoint(directory, number, _required(parameters))
    return _of_step(directory, checkpoint, f"{directory}, step {step_of(checkpoint):,}", parameters)


def split_selector(name: str) -> tuple[str, str]:
    """Splits a name into its folder and its checkpoint selector, the part after the @.

    The selector is "" if the whole name is a folder or has no selector. The revision of a hub model, after its @,
    remains a part of the name.

    Raises:
      UserError: the selector is unknown.
    """
    if is_hub(name):
        return name, ""
    directory, at, which = name.rstrip(os.sep).rpartition("@")
    if os.path.isdir(name) or not (at and os.path.isdir(directory)):
        return name, ""
    if not which or not _WHICH.fullmatch(which):
        raise UserError(
            f"{name}: after @ comes a step, {BEST}, {AVERAGE} (of all, or {AVERAGE}5: of 5), {EMA} or "
            f"{AS_TRAINED}, for example {directory}@{BEST}; got {which!r}"
        )
    return directory, which


def _check_run(directory: str) -> None:
    """Raises UserError unless `directory` is the folder of a run."""
    if not os.path.isdir(directory):
        read_config_json(directory)  # raises UserError with a suggestion
    if all(os.path.exists(os.path.join(directory, name)) for name in ("config.json", "checkpoints")):
        return
    folder, step = os.path.split(os.path.abspath(directory))
    if os.path.basename(folder) == "checkpoints" and step.isdecimal():
        raise UserError(f"{directory} is a checkpoint of a run: give {os.path.dirname(folder)}@{step}")
    names = sorted(os.listdir(directory))
    contents = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise UserError(
        f"{directory} is neither a run, which has config.json and checkpoints/, nor a Hugging Face directory, whose "
        f"config.json has a model_type; there is: {contents or 'nothing'}"
    )


def _best(workdir: str) -> Origin:
    experiment, directory = load(os.path.join(workdir, "config.json")), os.path.join(workdir, "checkpoints")
    parameters = experiment.evaluate.parameters
    for metric in (experiment.select_by, "loss"):  # checkpoints before version 0.5 have only a loss
        while best := best_checkpoint(directory, metric):
            step, value, _ = best
            try:
                checkpoint = find_checkpoint(workdir, step, _required(parameters))
            except UserError:
                if best_checkpoint(directory, metric) == best:  # otherwise the run has deleted it during this call
                    raise
                continue
            description = f"{workdir}, step {step:,}, the best by validation {metric}: {value:.4f}"
            return _of_step(workdir, checkpoint, description, parameters)
    raise UserError(
        f"{workdir}@{BEST}: no checkpoint there has a validation loss, so none is the best: give {workdir} for the "
        "newest; config.evaluate.every sets the interval of validations"
    )


def _required(parameters: str) -> Callable[[str], bool]:
    """Returns the predicate for the files of a checkpoint that are needed to read its parameters.

    Args:
      parameters: AS_TRAINED or EMA.
    """
    return parameter_files(EMA if parameters == EMA else TRAINED)


def _of_step(workdir: str, checkpoint: str, description: str, parameters: str) -> Origin:
    """Returns the origin for the parameters of one checkpoint.

    Args:
      checkpoint: its folder.
      parameters: AS_TRAINED or EMA.

    Raises:
      UserError: parameters=EMA, and the checkpoint has no moving average.
    """
    if parameters == AS_TRAINED:
        return Origin(workdir, (checkpoint,), description)
    if not any(name.startswith(f"{EMA}/") for name in read_run_json(checkpoint)["arrays"]):
        raise UserError(
            f"{workdir}@{EMA}: the run keeps no moving average of its parameters, for which config.train.ema_decay "
            f"must be set before it starts; {workdir}@{AVERAGE} is the mean of its checkpoints"
        )
    return Origin(workdir, (checkpoint,), f"{description}, moving average of the parameters", EMA)


def _average(workdir: str, newest: Optional[int] = None) -> Origin:
    directory = os.path.abspath(os.path.join(workdir, "checkpoints"))
    faults_of = {step: faults(directory, step, _required(AS_TRAINED)) for step in list_steps(directory)}
    valid = [step for step, problems in faults_of.items() if not problems]
    if not valid:
        find_checkpoint(workdir)  # raises UserError with the reason
    steps = last_steps(valid, load(os.path.join(workdir, "config.json")).checkpoint)
    if newest is not None and not 0 < newest <= len(steps):
        raise UserError(
            f"{workdir}@{AVERAGE}{newest} needs {newest} checkpoints, but only {len(steps)} of the last ones verify: "
            "give at most this number; config.checkpoint.keep sets the number of saved checkpoints, in addition to "
            "keep_at and the best"
        )
    if newest is None and (early := [f"{step:,}" for step in valid if step not in steps]):
        logging.warning("%s: the mean excludes earlier checkpoints: steps %s", workdir, ", ".join(early))
    steps = steps[-newest:] if newest else steps
    for line in skipped_messages(
        directory, {step: ", ".join(problems) for step, problems in faults_of.items() if problems}
    ):
        logging.warning("%s: %s", workdir, line)
    listed = f"steps {', '.join(f'{step:,}' for step in steps)}" if len(steps) > 1 else f"the one step {steps[0]:,}"
    return Origin(workdir, tuple(os.path.join(directory, str(step)) for step in steps), f"{workdir}, mean of {listed}")
