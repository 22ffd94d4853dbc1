"""Checks whether a config can train in a workdir, which may contain a run already."""

import copy
import dataclasses
import os

from pretrainax import config as config_lib
from pretrainax.checkpoints import longer
from pretrainax.checkpoints.steps import has_checkpoints, list_steps
from pretrainax.config import Experiment, UserError
from pretrainax.config.budget import RunBudget

_MAX_FIELDS = 5  # maximum number of differing fields in an error message


def check_workdir(workdir: str, experiment: Experiment, extend: bool = False) -> str:
    """Checks that a config can train in a workdir; an existing run that has made a step must have the same config.

    The check can run before the data is prepared: it takes the fields that the data determines from the existing run.

    Args:
      extend: allows more steps even if the completed steps would differ in a run of the new length (`longer.extend`).

    Returns:
      A message if an existing run is extended to more steps, otherwise "".

    Raises:
      UserError: the workdir has a run of a different config, or no run to extend.
    """
    path = os.path.join(workdir, "config.json")
    if extend and not os.path.exists(path):
        raise UserError(f"--extend requires an existing run, but --workdir={workdir} has none")
    if not has_steps(workdir) or not os.path.exists(path):
        return ""
    old, new = config_lib.load(path), copy.deepcopy(experiment)
    _complete(new, old)
    train = dataclasses.replace(old.train, steps=new.train.steps)
    resized = dataclasses.replace(old, train=train, phases=new.phases)
    if not config_lib.differences(resized, new) and old.train.steps != new.train.steps:
        return longer.extend(old, new, _steps_done(workdir), extend)
    if changed := config_lib.differences(old, new):
        more = f", and {len(changed) - _MAX_FIELDS} more" if len(changed) > _MAX_FIELDS else ""
        raise UserError(
            f"--workdir={workdir} holds a run of another config: {', '.join(changed[:_MAX_FIELDS])}{more}; "
            "choose another --workdir, or set these fields back to resume"
        )
    return ""


def _complete(new: Experiment, old: Experiment) -> None:
    """Sets the fields of `new` that the prepared data determines to their values in the existing run `old`."""
    if new.model.vocab_size == config_lib.AUTO:
        new.model.vocab_size = old.model.vocab_size
    config_lib.resolve_auto(new, None)
    if new.train.budget is not None:
        new.train.steps, new.train.budget = old.train.steps, None
    new.evaluate.every = new.evaluate.every or old.evaluate.every
    new.checkpoint.every = new.checkpoint.every or old.checkpoint.every
    _adopt_warmup(new, old)


def _adopt_warmup(new: Experiment, old: Experiment) -> None:
    """Sets a warmup of "auto" to the warmup of the run `old`, because a longer run has the same first steps."""
    if getattr(new.schedule, "warmup_steps", None) == config_lib.AUTO:
        new.schedule.warmup_steps = getattr(old.schedule, "warmup_steps", config_lib.AUTO)


def adopt_steps(workdir: str, experiment: Experiment) -> list[tuple[str, str]]:
    """Sets the steps of an existing run if `config.train.budget` is in FLOPs or time; returns header rows.

    A resumed run thus does not measure its speed again. A warmup of "auto" becomes the warmup of the run.
    """
    path, budget = os.path.join(workdir, "config.json"), experiment.train.budget
    if not has_steps(workdir) or not os.path.exists(path):
        return []
    old = config_lib.load(path)
    if budget is None or RunBudget.parse(budget).unit == "epochs":
        _adopt_warmup(experiment, old)
        return []
    _complete(experiment, old)
    warmup = experiment.schedule.warmup_steps
    flags = f"--config.train.budget=none --config.train.steps=N --config.schedule.warmup_steps={warmup} --extend"
    return [("steps", f"{experiment.train.steps:,}, as the run began; to extend it, replace the budget by {flags}")]


def has_steps(workdir: str) -> bool:
    """Checks whether the run in a workdir has results: a checkpoint (valid or damaged), or lines of metrics.jsonl."""
    metrics = os.path.join(workdir, "metrics.jsonl")
    has_metrics = os.path.exists(metrics) and os.path.getsize(metrics) > 0
    return has_metrics or has_checkpoints(os.path.join(workdir, "checkpoints"))


def _steps_done(workdir: str) -> int:
    """Returns the step of the newest checkpoint, which may be damaged, or 0 if there is no checkpoint."""
    directory = os.path.join(workdir, "checkpoints")
    return max(list_steps(directory), default=0) if os.path.isdir(directory) else 0
