"""Formats the commands that a user may run next, to be typed in the folder in which the run was started."""

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
    """Returns a table of commands that use the model of a finished run, one command per line.

    Args:
      workdir: the workdir as the user wrote it.
      words: command-line arguments of the `python -m pretrainax.main` command that trained the run.
      folder: the local folder of the run if `workdir` is a URL.
    """
    folder = folder or workdir
    experiment = load(os.path.join(folder, "config.json"))
    prefix = workdir.rstrip("/") if folder != workdir else os.path.normpath(workdir)  # without a trailing slash
    longer = [f"--config.train.steps={2 * experiment.train.steps}", *_last_phase_open(experiment), "--extend"]
    start = f"--config.checkpoint.init_from={workdir}", f"--config.tokenizer.path={os.path.join(workdir, 'tokenizer')}"
    recipe = [word for word in words if word.startswith("--config=")]  # for the sources in the model card
    no_adapt = ["--config.checkpoint.adapt=()"] if experiment.checkpoint.adapt else []  # the shapes are already adapted
    tensorboard = _command("-m", "tensorboard.main", f"--logdir={workdir}")
    if importlib.util.find_spec("tensorboard") is None:
        tensorboard = f"{_command('-m', 'pip', 'install', 'tensorboard')} && {tensorboard}"
    rows = [
        ("evaluate", _command("-m", "pretrainax.evaluate", f"--from={workdir}")),
        ("export to transformers", _export(folder, workdir, [f"--to={prefix}-huggingface", *recipe], experiment)),
        ("train longer", to_resume(workdir, [*words, *longer])),
        ("train on from here", to_resume(f"{prefix}-more", [*words, *start, *no_adapt])),
        ("curves in TensorBoard", tensorboard),
    ]
    return f"what next\n{text_table(rows, indent='  ')}"


def _last_phase_open(experiment: Experiment) -> list[str]:
    """Returns the flag that extends the last phase to the end of the run; [] unless this phase has a fixed length."""
    if not experiment.phases:
        return []
    *others, last = experiment.phases
    phases = (*others, dataclasses.replace(last, steps=None, tokens=None, share=None))
    return [] if phases == experiment.phases else [f"--config.phases={format_value(phases)}"]


def to_resume(workdir: str, words: Sequence[str]) -> str:
    """Returns the command that resumes a run, with the original arguments `words` and the workdir of the run."""
    return _command("-m", "pretrainax.main", *without(words, ["workdir"]), f"--workdir={workdir}")


def _export(folder: str, workdir: str, flags: Sequence[str], experiment: Experiment) -> str:
    try:
        describe_export(
            config_at_checkpoint(experiment, [experiment.train.steps]),
            load_tokenizer(os.path.join(folder, "tokenizer")).vocabulary,
        )
    except UserError as error:
        return f"not possible: {error}"
    return _command("-m", "pretrainax.huggingface", "export", f"--workdir={workdir}", *flags)


def without(words: Sequence[str], names: Sequence[str], switches: Sequence[str] = ()) -> list[str]:
    """Returns `words` without the flags `names` (--name=value, --name value) and `switches` (--name, --noname)."""
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
    """Returns a shell command with the current Python, written as `python` if PATH resolves to it."""
    folder, python = os.path.dirname(sys.executable), shutil.which("python")
    if python is None or os.path.dirname(os.path.abspath(python)) != folder:
        relative = os.path.relpath(sys.executable)
        python = sys.executable if relative.startswith(os.pardir) else relative
    else:
        python = "python"
    return shlex.join([python, *words])
