"""Formats commands that a user may run next, relative to the folder in which the run was started."""

import dataclasses
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Optional

from pretrainax.adapt.tuning import has_plain_model
from pretrainax.config import Experiment, UserError, config_at_checkpoint, load
from pretrainax.config.choice import format_value, is_importable
from pretrainax.config.values import leaf_fields
from pretrainax.inference.holes import PLAIN
from pretrainax.inference.predictions import task_in
from pretrainax.interop.directories import describe_export
from pretrainax.models.heads import HEADS
from pretrainax.reporting.tables import text_table
from pretrainax.tasks import Task, TextGeneration
from pretrainax.tokenization.base import Vocabulary, load_tokenizer

_BUDGET = ("config.train.budget",)


def after_training(workdir: str, words: Sequence[str], folder: str = "") -> str:
    """Formats a table of commands that use the model of a finished run, one command per row.

    Args:
      workdir: the workdir as the user wrote it.
      words: command-line arguments of the `pretrainax train` command that trained the run.
      folder: the run's local folder if `workdir` is a URL, otherwise "".
    """
    folder = folder or workdir
    words = remove_flags(words, (), ["extend"])  # not for a new run; for this run, `extension_flags` contains the flag
    experiment = load(os.path.join(folder, "config.json"))
    prefix = workdir.rstrip("/") if folder != workdir else os.path.normpath(workdir)  # without a trailing slash
    extension_flags = [f"--config.train.steps={2 * experiment.train.steps}", *_last_phase_open(experiment), "--extend"]
    has_budget = any(word.startswith("--config.train.budget") for word in words)
    if has_budget or experiment.objective.unit == "records":  # the warmup may be a tenth of the steps, and must stay
        extension_flags.insert(1, f"--config.schedule.warmup_steps={experiment.schedule.warmup_steps}")
    init_flags = (
        f"--config.checkpoint.init_from={workdir}",
        f"--config.tokenizer.path={os.path.join(workdir, 'tokenizer')}",
    )
    recipe_flag = [word for word in words if word.startswith("--config=")]  # for the sources in the model card
    no_adapt = ["--config.checkpoint.adapt=()"] if experiment.checkpoint.adapt else []  # the shapes are already adapted
    tensorboard = _python("-m", "tensorboard.main", f"--logdir={workdir}")
    if importlib.util.find_spec("tensorboard") is None:
        tensorboard = f"{_python('-m', 'pip', 'install', 'tensorboard')} && {tensorboard}"
    train_on = resume_command(f"{prefix}-more", _set_flags(words, [*init_flags, *no_adapt]))
    vocabulary = load_tokenizer(os.path.join(folder, "tokenizer")).vocabulary
    export_flags = [f"--workdir={workdir}", f"--to={prefix}-huggingface", *recipe_flag]
    uses = [
        *_uses(experiment, vocabulary, workdir),
        ("evaluate", _pretrainax("evaluate", f"--from={workdir}")),
        ("export to transformers", _export(experiment, vocabulary, export_flags)),
    ]
    if names := _classes_to_import(experiment):
        reason = f"only its config file can load a run with {names}: move it to a package (docs/how-to/own-code.md)"
        uses = [("generate, evaluate, export", f"not possible: {reason}")]
    rows = [
        *uses,
        ("train longer", resume_command(workdir, _set_flags(remove_flags(words, _BUDGET), extension_flags))),
        *([("train on from here", train_on)] if has_plain_model(experiment) else []),
        ("curves in TensorBoard", tensorboard),
    ]
    return f"what next\n{text_table(rows, indent='  ')}"


def after_import(workdir: str) -> str:
    """Formats a table of commands that use an imported model, one command per row."""
    experiment = load(os.path.join(workdir, "config.json"))
    source = "TextFiles(path='FOLDER')"
    rows = [
        *_uses(experiment, load_tokenizer(os.path.join(workdir, "tokenizer")).vocabulary, workdir),
        ("score texts", _pretrainax("evaluate", f"--from={workdir}", f"--source={source}")),
    ]
    return f"what next\n{text_table(rows, indent='  ')}"


def _uses(experiment: Experiment, vocabulary: Vocabulary, origin: str) -> Iterator[tuple[str, str]]:
    """Yields (label, command) for each use of a model: to predict labels, to generate text, or to fill masks.

    Yields nothing for a model that supports none of them.
    """
    model, task = experiment.model, experiment.objective
    if isinstance(task, Task) and task.has_head:
        files = ["--input=records.jsonl", "--output=predictions.jsonl"]
        if type(task).prediction is not Task.prediction and not _error(task_in, experiment, origin):
            yield "predict", _pretrainax("predict", f"--from={origin}", *files)
    elif model.head is not None or model.unsupported("generation") or not has_plain_model(experiment):
        return
    elif model.family in ("decoder", "encoder_decoder"):
        has_spans = model.family == "encoder_decoder" and len(vocabulary.sentinels) > 1 and not isinstance(task, Task)
        prompt = "The <extra_id_0> walks in <extra_id_1> park" if has_spans else "Once upon a time"
        prompt = task.filled_template(prompt) if isinstance(task, TextGeneration) else prompt
        yield "generate", _pretrainax("generate", f"--from={origin}", prompt)
    elif vocabulary.mask is not None and (model.generator is not None or HEADS["lm"].is_in(model)):
        yield "fill", _pretrainax("generate", f"--from={origin}", "--fill=5", f"The {PLAIN} walks in the park.")


def _classes_to_import(experiment: Experiment) -> str:
    """Returns the names of the config's classes that a command without its config file does not find."""
    types = dict.fromkeys(str(field.value) for field in leaf_fields(experiment) if field.path.endswith(".type"))
    return ", ".join(name.rpartition(":")[2] for name in types if not is_importable(name))


def _last_phase_open(experiment: Experiment) -> list[str]:
    """Returns the flag that extends the last phase to the run's end; returns [] if none is needed."""
    if not experiment.phases:
        return []
    *earlier_phases, last_phase = experiment.phases
    phases = (*earlier_phases, dataclasses.replace(last_phase, steps=None, tokens=None, share=None))
    return [] if phases == experiment.phases else [f"--config.phases={format_value(phases)}"]


def resume_command(workdir: str, words: Sequence[str]) -> str:
    """Formats the command that resumes the run in `workdir`, with its original arguments `words`."""
    return _pretrainax("train", *_set_flags(words, [f"--workdir={workdir}"]))


def _export(experiment: Experiment, vocabulary: Vocabulary, flags: Sequence[str]) -> str:
    error = _error(describe_export, config_at_checkpoint(experiment, [experiment.train.steps]), vocabulary)
    return f"not possible: {error}" if error else _pretrainax("huggingface", "export", *flags)


def _error(function: Callable, *arguments: object) -> Optional[UserError]:
    """Calls a function; returns its UserError, or None if it raises none."""
    try:
        function(*arguments)
    except UserError as error:
        return error
    return None


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


def _set_flags(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Appends `flags` (--name=value) to `words`, without earlier values of the same flags."""
    names = [flag.removeprefix("--").partition("=")[0] for flag in flags]
    return [*remove_flags(words, names), *flags]


def _pretrainax(command: str, *words: str) -> str:
    """Formats a `pretrainax` command; as `python -m pretrainax` if PATH does not find this interpreter's script."""
    script = shutil.which("pretrainax")
    if script is not None and os.path.dirname(os.path.abspath(script)) == os.path.dirname(sys.executable):
        return _join(["pretrainax", command, *words])
    return _python("-m", "pretrainax", command, *words)


def _python(*words: str) -> str:
    """Formats a shell command for the current Python interpreter, as `python` if PATH finds this interpreter."""
    folder, python = os.path.dirname(sys.executable), shutil.which("python")
    if python is None or os.path.dirname(os.path.abspath(python)) != folder:
        relative = os.path.relpath(sys.executable)
        python = sys.executable if relative.startswith(os.pardir) else relative
    else:
        python = "python"
    return _join([python, *words])


def _join(words: Sequence[str]) -> str:
    return " ".join(map(_quote, words))


def _quote(word: str) -> str:
    """Quotes a word for a shell: as shlex does, or as --flag="A(b='c')", which is easier to read."""
    name, _, value = word.partition("=")
    if "'" in value and not set(value) & set('"$`\\!\n') and shlex.quote(name) == name:
        return f'{name}="{value}"'
    return shlex.quote(word)
