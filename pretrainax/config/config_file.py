"""Reads the config that --config names: `t5_base:large`, or a file: what its get_config("large") returns.

The files of `configs/` are installed with the package, and found by their names wherever a command is started; so is
`configs/t5_base.py` where there is no such file.
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

from pretrainax.config.experiment import Experiment
from pretrainax.files.errors import UserError, nearest
from pretrainax.files.paths import path_problem

CONFIGS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "configs")
_MODULE = "config_config"  # what a config file is imported as: its own choices have this name in config.json


def read_config_file(given: str, init_from: Optional[str] = None) -> Experiment:
    """Returns the config; UserError where the file is none, or fails, with its line.

    init_from: what the run is to start from, for a get_config(variant, init_from) that makes its model of it.
    """
    if problem := path_problem(given):
        raise UserError(f"--config={given}: {problem}")
    file, variant = find_config(given)
    if os.path.isdir(file):
        raise UserError(_folder(file))
    if file.endswith(".json") and os.path.exists(file):
        raise UserError(
            f"--config={file} is JSON, it must be a name as t5_base, or a Python file; to go on with a run, give the "
            "command that started it, with the same --config and --workdir"
        )
    if not os.path.isfile(file):
        raise UserError(_missing(file))
    try:
        module = _import(file)
        if not hasattr(module, "get_config"):
            raise UserError(f"{file} has no function get_config(variant), which returns the config of a run")
        takes_start = "init_from" in inspect.signature(module.get_config).parameters
        start = {"init_from": init_from} if takes_start and init_from and init_from.lower() != "none" else {}
        experiment = module.get_config(*([variant] if ":" in given else []), **start)
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"{_place(file, e)}: {type(e).__name__}: {e} (--debug shows where)") from e
    if not isinstance(experiment, Experiment):
        raise UserError(f"{file}: get_config returned {type(experiment).__name__}, it must return an Experiment")
    return experiment


def find_config(given: str) -> tuple[str, str]:
    """Returns the file that --config names, which may not be there, and the variant after the colon."""
    file, _, variant = given.partition(":")
    folder, name = os.path.split(file)
    if not os.path.isfile(file) and (folder == "configs" if name.endswith(".py") else not folder):
        installed = os.path.join(CONFIGS, f"{name.removesuffix('.py')}.py")
        if os.path.isfile(installed):
            return installed, variant
    return file, variant


def config_names() -> list[str]:
    """Returns the names of the configs that are installed: "t5_base"."""
    files = glob.glob(os.path.join(glob.escape(CONFIGS), "*.py"))
    return sorted(os.path.basename(file).removesuffix(".py") for file in files)


def configs_like(name: str) -> list[str]:
    """Returns the configs that begin with the first word of a name: t5_base of "t5_small"."""
    word = re.split("[-_.:/]", name)[0]
    return [config for config in config_names() if word and config.startswith(word)]


def _import(file: str) -> ModuleType:
    module = ModuleType(_MODULE)
    module.__file__ = os.path.abspath(file)
    sys.modules[_MODULE] = module  # so that what it defines can be sent to other processes
    importlib.machinery.SourceFileLoader(_MODULE, file).exec_module(module)
    return module


def _folder(path: str) -> str:
    if os.path.exists(os.path.join(path, "config.json")):
        return (
            f"--config={path} is the folder of a run, it must be a Python file: to go on with the run, give the "
            f"command that started it, with its --config=FILE.py and --workdir={path}"
        )
    there = sorted(os.path.basename(f) for f in glob.glob(os.path.join(glob.escape(path), "*.py")))
    named = f", as --config={os.path.join(path, there[0])}" if there else ""
    return f"--config={path} is a folder, it must be a Python file{named}"


def _missing(file: str) -> str:
    if os.path.isfile(f"{file}.py"):
        return f"no config file {file!r}, did you mean {f'{file}.py'!r}?"
    folder, name = os.path.split(file)
    there = glob.glob(os.path.join(glob.escape(folder), "*.py"))
    if folder == "configs":
        there += [f"configs/{config}.py" for config in config_names()]
    elif not folder:
        if like := configs_like(name):
            return f"no config {file!r}, did you mean {' or '.join(map(repr, like))}?"
        there += config_names()
    return f"no config file {file!r}, {nearest(file, set(there)) if there else 'nor another in its folder'}"


def _place(file: str, error: Exception) -> str:
    """Returns "file:line" of an error: where it is no syntax, the last line of this file on its way."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(file)]
    line = error.lineno if isinstance(error, SyntaxError) else next(reversed(lines), None)
    return file if line is None else f"{file}:{line}"
