"""Formats commands that a user may run next, relative to the folder in which the run was started."""

import dataclasses
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Sequence

from pretrainax.config import Experiment, UserError, config_at_checkpoint, load
from pretrainax.config.choice import format_value
from pretrainax.interop.directories import describe_export
from pretrainax.reporting.tables import text_table
from pretrainax.tokenization.base import load_tokenizer


def after_training(workdir: str, words: Sequence[str], folder: str = "") -> str:
    """Formats a table of commands that use the model of a finished run, one command per row.

    Args:
      workdir: the workdir as the user wrote it.
      words: command-line arguments of the `python -m pretrainax.main` command that trained the run.
      folder: the run's local folder if `workdir` is a URL, otherwise "".
    """
    folder = folder or workdir
    experiment = load(os.path.join(folder, "config.json"))
    prefix = workdir.rstrip("/") if folder != workdir else os.path.normpath(workdir)  # without a trailing slash
    extension_flags = [f"--config.train.steps={2 * experiment.train.steps}", *_last_phase_open(experiment), "--extend"]
    if experiment.objective.unit == "records":  # the warmup may be a tenth of the steps, and must stay the same
        extension_flags.insert(1, f"--config.schedule.warmup_steps={experiment.schedule.warmup_steps}")
    init_flags = (
        f"--config.checkpoint.init_from={workdir}",
        f"--config.tokenizer.path={os.path.join(workdir, 'tokenizer')}",
    )
    recipe_flag = [word for word in words if word.startswith("--config=")]  # for the sources in the model card
    no_adapt = ["--config.checkpoint.adapt=()"] if experiment.checkpoint.adapt else []  # the shapes are already adapted
    tensorboard = _command("-m", "tensorboard.main", f"--logdir={workdir}")
    if importlib.util.find_spec("tensorboard") is None:
        tensorboard = f"{_command('-m', 'pip', 'install', 'tensorboard')} && {tensorboard}"
    rows = [
        ("evaluate", _command("-m", "pretrainax.evaluate", f"--from={workdir}")),
        ("export to transformers", _export(folder, workdir, [f"--to={prefix}-huggingface", *recipe_flag], experiment)),
        ("train longer", resume_command(workdir, [*remove_flags(words, ["config.train.epochs"]), *extension_flags])),
        ("train on from here", resume_command(f"{prefix}-more", [*words, *init_flags, *no_adapt])),
        ("curves in TensorBoard", tensorboard),
    ]
    return f"what next\n{text_table(rows, indent='  ')}"


def _last_phase_open(experiment: Experiment) -> list[str]:
    """Returns the flag that extends the last phase to the run's end; returns [] if none is needed."""
    if not experiment.phases:
        return []
    *earlier_phases, last_phase = experiment.phases
    phases = (*earlier_phases, dataclasses.replace(last_phase, steps=None, tokens=None, share=None))
    return [] if phases == experiment.phases else [f"--config.phases={format_value(phases)}"]


def resume_command(workdir: str, words: Sequence[str]) -> str:
    """Formats the command that resumes the run in `workdir`, with its original arguments `words`."""
    return _command("-m", "pretrainax.main", *remove_flags(words, ["workdir"]), f"--workdir={workdir}")


def _export(folder: str, workdir: str, flags: Sequence[str], experiment: Experiment) -> str:
    try:
        describe_export(
            config_at_checkpoint(experiment, [experiment.train.steps]),
            load_tokenizer(os.path.join(folder, "tokenizer")).vocabulary,
        )
    except UserError as error:
        return f"not possible: {error}"
    return _command("-m", "pretrainax.huggingface", "export", f"--workdir={workdir}", *flags)


def remove_flags(words: Sequence[str], names: Sequence[str], switches: Sequence[str] = ()) -> list[str]:
    """Removes the flags `names` (--name=value, --name value) and `switches` (--name, --noname) from `words`."""
    remaining, is_value = [], False
    for word in words:
        name, equals, _ = word.lstrip("-").partition("=") if word.startswith("-") else ("", "", "")
        if is_value:
            is_value = False
        elif name in names:
            is_value = not equals
        elif not name or name.removeprefix("no") not in switches:
            remaining.append(word)
    return remaining


def _command(*words: str) -> str:
    """Formats a shell command for the current Python interpreter, as `python` if that is what PATH finds."""
    folder, python = os.path.dirname(sys.executable), shutil.which("python")
    if python is None or os.path.dirname(os.path.abspath(python)) != folder:
        relative = os.path.relpath(sys.executable)
        python = sys.executable if relative.startswith(os.pardir) else relative
    else:
        python = "python"
    return shlex.join([python, *words])
