"""Resolves the name of a trained model to its parameters: checkpoints of a run, or a Hugging Face directory.

    runs/mine            the newest valid checkpoint, with the parameters that validation uses: the moving average if
                         config.evaluate.parameters is "ema", otherwise the trained parameters
    runs/mine@2000       the checkpoint of step 2000
    runs/mine@best       the saved checkpoint with the best validation result, according to the run's selection metric
                         (config.evaluate.select_by)
    runs/mine@average    the mean parameters of the last valid checkpoints, without checkpoints that the run keeps only
                         because of config.checkpoint.keep_at or only as the best checkpoint
    runs/mine@average5   the mean parameters of the newest 5 checkpoints that runs/mine@average uses
    runs/mine@ema        the moving average of the parameters (config.train.ema_decay) in the newest checkpoint;
                         @ema2000 for step 2000
    runs/mine@trained    the trained parameters, even if validation uses the moving average; @trained2000 for step 2000
    exports/mine         a Hugging Face directory: an export, or another model
    hf:org/name          a Hugging Face Hub model; @ may be followed by a branch, tag or commit: hf:org/name@refs/pr/1

If a folder with the complete name exists, the @ is part of the folder name.
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
_SELECTOR = re.compile(rf"{BEST}|({AVERAGE}|{EMA}|{AS_TRAINED})?([0-9]*)")  # checkpoint selector after the @, or empty


@dataclasses.dataclass(frozen=True)
class Origin:
    """The location of the parameters of a trained model: checkpoint folders of a run, or a Hugging Face directory."""

    directory: str  # folder of the run, or the Hugging Face directory
    steps: tuple[str, ...]  # checkpoint folders, averaged if there are several; () for a Hugging Face directory
    description: str  # description for messages: "runs/mine, step 2,000"
    folder: str = TRAINED  # folder in each checkpoint: TRAINED or EMA (moving average of the parameters)
    hub: Optional[str] = None  # hub model with its commit, hf:org/name@1a2b…; None: not from the Hub


def find_origin(name: str) -> Origin:
    """Resolves `name` to the location of its parameters. The module docstring describes the syntax of `name`.

    Raises:
      UserError: the path does not exist or contains no model, or the selected checkpoint is missing or damaged. For
        @best, also if no checkpoint has a validation result.
    """
    resolved = _resolve(name)
    return dataclasses.replace(resolved, description=with_urls(resolved.description))


def _resolve(name: str) -> Origin:
    """Resolves `name` as `find_origin` does, but `Origin.description` contains local paths instead of URLs."""
    if problem := path_problem(name, takes_hub=True):
        raise UserError(f"{name}: {problem}")
    if is_hub(name):
        directory, exact = local_path(name), pinned_name(name)
        commit = "" if name == exact else f" (commit {exact.rpartition('@')[2][:12]})"
        return Origin(directory, (), f"{name}{commit}", hub=exact)
    directory, selector = split_selector(local_path(os.path.expanduser(name)))
    if is_huggingface_directory(directory):
        if selector:
            raise UserError(f"{directory} is a Hugging Face directory, which has no checkpoints: leave out @{selector}")
        return Origin(directory, (), directory)
    _check_run(directory)
    if selector == BEST:
        return _best_origin(directory)
    match = _SELECTOR.fullmatch(selector)
    assert match is not None  # `split_selector` raises UserError for unknown selectors
    kind, number = match[1], int(match[2]) if match[2] else None
    if kind == AVERAGE:
        return _average_origin(directory, number)
    parameters = kind or load(os.path.join(directory, "config.json")).evaluate.parameters
    checkpoint = find_checkpoint(directory, number, _required(parameters))
    return _step_origin(directory, checkpoint, f"{directory}, step {step_of(checkpoint):,}", parameters)


def split_selector(name: str) -> tuple[str, str]:
    """Splits `name` at the last @ into the folder of a run and the checkpoint selector.

    The selector is "" if `name` has no selector or is the path of an existing folder. The name of a hub model is not
    split: the revision after its @ remains part of the name.

    Raises:
      UserError: the selector is unknown.
    """
    if is_hub(name):
        return name, ""
    directory, separator, selector = name.rstrip(os.sep).rpartition("@")
    if os.path.isdir(name) or not (separator and os.path.isdir(directory)):
        return name, ""
    if not selector or not _SELECTOR.fullmatch(selector):
        raise UserError(
            f"{name}: after @ comes a step, {BEST}, {AVERAGE} (of all, or {AVERAGE}5: of 5), {EMA} or "
            f"{AS_TRAINED}, for example {directory}@{BEST}; got {selector!r}"
        )
    return directory, selector


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


def _best_origin(workdir: str) -> Origin:
    """Returns the `Origin` of a run's saved checkpoint that has the best validation result."""
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
            return _step_origin(workdir, checkpoint, description, parameters)
    raise UserError(
        f"{workdir}@{BEST}: no checkpoint there has a validation loss, so none is the best: give {workdir} for the "
        "newest; config.evaluate.every sets the interval of validations"
    )


def _required(parameters: str) -> Callable[[str], bool]:
    """Returns a predicate that selects, by file name, the checkpoint files that contain the given parameters.

    Args:
      parameters: AS_TRAINED or EMA.
    """
    return parameter_files(EMA if parameters == EMA else TRAINED)


def _step_origin(workdir: str, checkpoint: str, description: str, parameters: str) -> Origin:
    """Returns the `Origin` of the parameters in one checkpoint.

    Args:
      checkpoint: folder of the checkpoint.
      parameters: AS_TRAINED or EMA.

    Raises:
      UserError: `parameters` is EMA, and the checkpoint has no moving average.
    """
    if parameters == AS_TRAINED:
        return Origin(workdir, (checkpoint,), description)
    if not any(name.startswith(f"{EMA}/") for name in read_run_json(checkpoint)["arrays"]):
        raise UserError(
            f"{workdir}@{EMA}: the run keeps no moving average of its parameters, for which config.train.ema_decay "
            f"must be set before it starts; {workdir}@{AVERAGE} is the mean of its checkpoints"
        )
    return Origin(workdir, (checkpoint,), f"{description}, moving average of the parameters", EMA)


def _average_origin(workdir: str, newest: Optional[int] = None) -> Origin:
    """Returns the `Origin` of the mean parameters of a run's last valid checkpoints.

    Args:
      newest: number of checkpoints to average, or None for all of them.
    """
    directory = os.path.abspath(os.path.join(workdir, "checkpoints"))
    faults_by_step = {step: faults(directory, step, _required(AS_TRAINED)) for step in list_steps(directory)}
    valid = [step for step, problems in faults_by_step.items() if not problems]
    if not valid:
        find_checkpoint(workdir)  # raises UserError with the reason
    steps = last_steps(valid, load(os.path.join(workdir, "config.json")).checkpoint)
    if newest is not None and not 0 < newest <= len(steps):
        raise UserError(
            f"{workdir}@{AVERAGE}{newest} needs {newest} checkpoints, but only {len(steps)} of the last ones verify: "
            "give at most this number; config.checkpoint.keep sets the number of saved checkpoints, in addition to "
            "keep_at and the best"
        )
    if newest is None and (excluded := [f"{step:,}" for step in valid if step not in steps]):
        logging.warning("%s: the mean excludes earlier checkpoints: steps %s", workdir, ", ".join(excluded))
    steps = steps[-newest:] if newest else steps
    for line in skipped_messages(
        directory, {step: ", ".join(problems) for step, problems in faults_by_step.items() if problems}
    ):
        logging.warning("%s: %s", workdir, line)
    listing = f"steps {', '.join(f'{step:,}' for step in steps)}" if len(steps) > 1 else f"the one step {steps[0]:,}"
    return Origin(workdir, tuple(os.path.join(directory, str(step)) for step in steps), f"{workdir}, mean of {listing}")
