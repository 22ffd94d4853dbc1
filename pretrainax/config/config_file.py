"""Loads the config that --config selects: an installed config by name, or a Python file, with an optional variant.

`t5_base:large` calls `get_config("large")` in `configs/t5_base.py`. The files in `configs/` are installed with the
package and available by name from any directory. `--config=configs/t5_base.py` also selects the installed file if that
path does not exist.
"""

import glob
import importlib.machinery
import inspect
import os
import re
import sys
import traceback
from types import ModuleType
from typing import Optional

from pretrainax.config.choice import CONFIG_MODULE, Choice
from pretrainax.config.experiment import Experiment
from pretrainax.files.errors import UserError, nearest
from pretrainax.files.paths import path_problem

CONFIGS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "configs")


def read_config_file(given: str, init_from: Optional[str] = None) -> Experiment:
    """Imports a config file, calls its function `get_config`, and returns the config.

    Args:
      given: value of --config, for example "t5_base:large" or "my/config.py".
      init_from: value of config.checkpoint.init_from, passed to `get_config` if it takes a second argument, from which
        it builds the model config.

    Raises:
      UserError: the file is not a config file, or its code raises an error, whose line number the message contains.
    """
    if problem := path_problem(given):
        raise UserError(f"--config={given}: {problem}")
    file, variant = find_config(given)
    if os.path.isdir(file):
        raise UserError(_folder_message(file))
    if file.endswith(".json") and os.path.exists(file):
        raise UserError(
            f"--config={file} is JSON, it must be a name such as t5_base, or a Python file. To resume a run, repeat "
            "the command that started it, with the same --config and --workdir"
        )
    if not os.path.isfile(file):
        raise UserError(_missing_message(file))
    try:
        module = import_file(file)
        if not hasattr(module, "get_config"):
            raise UserError(f"{file} has no function get_config(variant), which returns the config of a run")
        takes_init_from = "init_from" in inspect.signature(module.get_config).parameters
        kwargs = {"init_from": init_from} if takes_init_from and init_from and init_from.lower() != "none" else {}
        experiment = module.get_config(*([variant] if variant else []), **kwargs)
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"{_location(file, e)}: {type(e).__name__}: {e} (--debug shows where)") from e
    sys.modules[CONFIG_MODULE] = module  # again, because get_config may have read another config file
    if not isinstance(experiment, Experiment):
        raise UserError(f"{file}: get_config returned {type(experiment).__name__}, it must return an Experiment")
    return experiment


def find_config(given: str) -> tuple[str, str]:
    """Splits a --config value into the config file's path and the variant ("" if there is none).

    The name of an installed config is resolved to the installed file's path. The file may not exist.
    """
    for end in re.finditer(r":|\Z", given):  # the name of a folder or file may contain colons, too
        file = given[: end.start()]
        if found := _existing_file(file):
            return found, given[end.end() :]
    folder, name = os.path.split(given)
    file, _, variant = name.partition(":")
    has_none = variant.endswith(".py") or os.path.exists(given)  # a file of Windows, or a folder
    return (given, "") if has_none else (os.path.join(folder, file), variant)


def _existing_file(file: str) -> Optional[str]:
    """Returns the path of a config file, which may be the name of an installed config; None if it does not exist."""
    folder, name = os.path.split(file)
    installed = os.path.join(CONFIGS, f"{name.removesuffix('.py')}.py")
    may_be_installed = folder == "configs" if name.endswith(".py") else not folder
    return next((path for path in (file, *[installed] * may_be_installed) if os.path.isfile(path)), None)


def config_names() -> list[str]:
    """Returns the names of the installed configs, for example "t5_base"."""
    files = glob.glob(os.path.join(glob.escape(CONFIGS), "*.py"))
    return sorted(os.path.basename(file).removesuffix(".py") for file in files)


def configs_like(name: str) -> list[str]:
    """Returns the installed configs whose names share their first word with `name`: t5_base for "t5_small"."""
    word = re.split("[-_.:/]", name)[0]
    return [config for config in config_names() if word and config.startswith(word)]


def file_with_classes() -> Optional[str]:
    """Returns the path of the config file that was read last if it defines choices, for `import_file`; else None."""
    has_classes = any(choice.__module__ == CONFIG_MODULE for choice in Choice.imported())
    return sys.modules[CONFIG_MODULE].__file__ if has_classes else None


def import_file(file: str) -> ModuleType:
    """Imports a config file as the module whose classes this process can pickle and unpickle; returns the module."""
    module = ModuleType(CONFIG_MODULE)
    module.__file__ = os.path.abspath(file)
    sys.modules[CONFIG_MODULE] = module
    importlib.machinery.SourceFileLoader(CONFIG_MODULE, file).exec_module(module)
    return module


def _folder_message(path: str) -> str:
    """Formats the error message for a --config value that is a folder."""
    if os.path.exists(os.path.join(path, "config.json")):
        return (
            f"--config={path} is a run folder, it must be a Python file. To resume the run, repeat the "
            f"command that started it, with its --config=FILE.py and --workdir={path}"
        )
    files = sorted(os.path.basename(f) for f in glob.glob(os.path.join(glob.escape(path), "*.py")))
    example = f", such as --config={os.path.join(path, files[0])}" if files else ""
    return f"--config={path} is a folder, it must be a Python file{example}"


def _missing_message(file: str) -> str:
    """Formats the error message for a missing config file, suggesting similar names."""
    if os.path.isfile(f"{file}.py"):
        return f"no config file {file!r}, did you mean {f'{file}.py'!r}?"
    folder, name = os.path.split(file)
    files = glob.glob(os.path.join(glob.escape(folder), "*.py"))
    if folder == "configs":
        files += [f"configs/{config}.py" for config in config_names()]
    elif not folder:
        if similar := configs_like(name):
            return f"no config {file!r}, did you mean {' or '.join(map(repr, similar))}?"
        files += config_names()
    return f"no config file {file!r}, {nearest(file, set(files)) if files else 'and its folder has no config files'}"


def _location(file: str, error: Exception) -> str:
    """Formats where an error occurred in a config file as "file:line", or as "file" if the line is unknown.

    The line contains the syntax error, or belongs to the last stack frame in the file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(file)]
    line = error.lineno if isinstance(error, SyntaxError) else next(reversed(lines), None)
    return file if line is None else f"{file}:{line}"
