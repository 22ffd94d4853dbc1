"""The commands that come after a run, each as it can be typed where the run was started."""

import dataclasses
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Sequence

from pretrainax.config import Experiment, UserError, load, trained_as
from pretrainax.config.choice import written
from pretrainax.interop.directories import describe_export
from pretrainax.reporting.tables import text_table
from pretrainax.tokenization.base import load_tokenizer


def after_training(workdir: str, words: Sequence[str], folder: str = "") -> str:
    """Returns the commands that use the model of a run that has ended, a line each.

    Args:
      workdir: as the user has called it.
      words: those after `python -m pretrainax.main` that started the run.
      folder: where the files of a URL are on this machine.
    """
    folder = folder or workdir
    experiment = load(os.path.join(folder, "config.json"))
    beside = workdir.rstrip("/") if folder != workdir else os.path.normpath(workdir)  # without a slash at its end
    longer = [f"--config.train.steps={2 * experiment.train.steps}", *_last_phase_open(experiment), "--extend"]
    start = f"--config.checkpoint.init_from={workdir}", f"--config.tokenizer.path={os.path.join(workdir, 'tokenizer')}"
    recipe = [word for word in words if word.startswith("--config=")]  # whose sources the model card names
    as_it_is = ["--config.checkpoint.adapt=()"] if experiment.checkpoint.adapt else []  # of this shape already
    board = _command("-m", "tensorboard.main", f"--logdir={workdir}")
    if importlib.util.find_spec("tensorboard") is None:
        board = f"{_command('-m', 'pip', 'install', 'tensorboard')} && {board}"
    rows = [
        ("evaluate", _command("-m", "pretrainax.evaluate", f"--from={workdir}")),
        ("export to transformers", _export(folder, workdir, [f"--to={beside}-huggingface", *recipe], experiment)),
        ("train longer", to_resume(workdir, [*words, *longer])),
        ("train on from here", to_resume(f"{beside}-more", [*words, *start, *as_it_is])),
        ("curves in TensorBoard", board),
    ]
    return f"what next\n{text_table(rows, indent='  ')}"


def _last_phase_open(experiment: Experiment) -> list[str]:
    """Returns the flag by which the last phase takes what is left of a run, where it has a length of its own."""
    if not experiment.phases:
        return []
    *others, last = experiment.phases
    phases = (*others, dataclasses.replace(last, steps=None, tokens=None, share=None))
    return [] if phases == experiment.phases else [f"--config.phases={written(phases)}"]


def to_resume(workdir: str, words: Sequence[str]) -> str:
    """Returns the command that goes on with a run: the one that started it, with its workdir."""
    return _command("-m", "pretrainax.main", *without(words, ["workdir"]), f"--workdir={workdir}")


def _export(folder: str, workdir: str, flags: Sequence[str], experiment: Experiment) -> str:
    try:
        describe_export(
            trained_as(experiment, [experiment.train.steps]),
            load_tokenizer(os.path.join(folder, "tokenizer")).vocabulary,
        )
    except UserError as error:
        return f"not possible: {error}"
    return _command("-m", "pretrainax.huggingface", "export", f"--workdir={workdir}", *flags)


def without(words: Sequence[str], names: Sequence[str], switches: Sequence[str] = ()) -> list[str]:
    """Leaves out flags: --name=value, or --name and the word after it, and switches: --name or --noname."""
    kept, is_value = [], False
    for word in words:
        name, equals, _ = word.lstrip("-").partition("=") if word.startswith("-") else ("", "", "")
        if is_value:
            is_value = False
        elif name in names:
            is_value = not equals
        elif not name or name.removeprefix("no") not in switches:
            kept.append(word)
    return kept


def _command(*words: str) -> str:
    """Returns a line for a shell, with the Python that runs this: by its name where that finds it."""
    here, python = os.path.dirname(sys.executable), shutil.which("python")
    if python is None or os.path.dirname(os.path.abspath(python)) != here:
        inside = os.path.relpath(sys.executable)
        python = sys.executable if inside.startswith(os.pardir) else inside
    else:
        python = "python"
    return shlex.join([python, *words])
