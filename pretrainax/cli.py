"""The part that all commands share: the flags --config and --debug, one clear line for a mistake, exit codes.

Imports no JAX: loader workers import the command's module again and must stay light.
"""

import errno
import functools
import os
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Literal

from absl import app, flags, logging
from ml_collections import config_flags

from pretrainax.config import Choice, Experiment, RunFailed, UserError, load, nearest
from pretrainax.config.validation import validate


class _ChoiceParser(flags.ArgumentParser):
    """Reads a whole Choice from a flag: --config.data.source="TextFiles(path='my/books')"."""

    def parse(self, argument: str | Choice) -> Choice:
        return argument if isinstance(argument, Choice) else Choice.parse(argument)  # absl parses defaults too


def _register_choices() -> None:
    """Lets flags give a whole Choice, of each class that is imported so far."""
    for kind in Choice.imported():
        config_flags.register_flag_parser_for_type(kind, _ChoiceParser())


_register_choices()
config_flags.register_flag_parser_for_type(Literal, flags.ArgumentParser())  # `validate` says what is allowed
CONFIG = config_flags.DEFINE_config_file("config", None, "File with get_config(variant), as configs/t5_base.py:large")
WORKDIR = flags.DEFINE_string("workdir", None, "Run directory; of a new run where not given: runs/<config>-<time>")
# What a disk has, and no program.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM)
_LINE = 4000  # characters of an error
DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of a bad config or input")


def run(main: Callable[..., int], commands: tuple[str, ...] = (), of_workdir: bool = False) -> None:
    """Parses the flags, calls `main` and exits with what it returns, or with 2 after one line on a UserError.

    Args:
      commands: the first word after the program's name is one of them, and what `main` is called with.
      of_workdir: the config is that of the run in --workdir, and no file; flags override its fields.
    """

    def guarded(words: list[str]) -> int:
        try:
            return main(*words[1:])
        except UserError as e:
            if DEBUG.value:
                raise
            return complain(e)
        except KeyboardInterrupt:  # where no `PreemptionHandler` is at work: while a run prepares, in other commands
            print("\npretrainax: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
        except OSError as e:
            if DEBUG.value or e.errno not in _DISK:
                raise
            where = e.filename or "a file that cannot be read or written"
            return complain(RunFailed(f"{where}: {e.strerror}; when that is mended, run the same command again"))

    own = flags.FLAGS.get_flags_for_module(main.__module__)
    for flag in (flags.FLAGS["config"], flags.FLAGS["workdir"], flags.FLAGS["debug"], *own):  # what --help shows
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    sys.modules["__main__"].__doc__ = sys.modules[main.__module__].__doc__
    app.run(guarded, flags_parser=functools.partial(_parse, commands=commands, of_workdir=of_workdir))


def experiment(files: bool = True) -> Experiment:
    """Returns the config of --config with its overrides, validated.

    files: corpus and tokenizer must be there.
    """
    if CONFIG.value is None:
        raise UserError("--config is missing; for a first run: --config=configs/quickstart.py")
    validate(CONFIG.value, files)
    return CONFIG.value


def overrides() -> list[str]:
    """Returns the fields of the config that flags set: "train.steps"."""
    return list(flags.FLAGS["config"].override_values)


def folder(flag: str, path: str) -> str:
    """Makes the folder that a flag names, before the work whose results it is for."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as e:
        raise UserError(f"--{flag}={path} cannot be written: {e.strerror}") from e
    return path


def config_name() -> str:
    """Names the config: `t5_base-large` for --config=configs/t5_base.py:large."""
    file, _, variant = flags.FLAGS["config"].config_filename.partition(":")
    return "-".join(filter(None, (os.path.basename(file).removesuffix(".py"), variant)))


def complain(error: Exception) -> int:
    """Prints an error as one line; returns the exit code."""
    print(f"pretrainax: {one_line(error)}", file=sys.stderr, flush=True)
    return getattr(error, "exit_code", UserError.exit_code)


def one_line(error: Exception) -> str:
    """Returns the text of an error for a terminal: without line breaks and control characters, and not too long."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(str(error).split()))
    return line if len(line) <= _LINE else f"{line[:_LINE]} … and {len(line) - _LINE:,} characters more"


def _parse(argv: list[str], commands: tuple[str, ...], of_workdir: bool) -> list[str]:
    logging.use_absl_handler()
    logging.set_verbosity(logging.WARNING)
    try:
        if of_workdir:
            _take_config_of_workdir(argv)
        else:
            _check_config_flags(argv)  # which imports the classes that the config file does
        _register_choices()
        rest = flags.FLAGS(argv)
        if commands and rest[1:2] not in [[command] for command in commands]:
            raise UserError(f"say what to do first: {' or '.join(commands)}; got {' '.join(rest[1:2]) or 'nothing'!r}")
        if len(rest) > 1 + bool(commands):
            raise UserError(f"unexpected argument {rest[1 + bool(commands)]!r}; flags look like --config=FILE")
        return rest
    except (flags.Error, UserError) as e:
        if "--debug" in argv:
            raise
        sys.exit(complain(e))


def _take_config_of_workdir(argv: list[str]) -> None:
    """Makes the config.json of --workdir what --config.FIELD=VALUE overrides; --config=FILE, which it is not, fails."""
    flags.FLAGS(argv, known_only=True)
    workdir = WORKDIR.value
    if CONFIG.value is not None:
        raise UserError(
            "--config=FILE is not for this command: it takes the config of the run in --workdir, of which flags set "
            "single fields, as --config.data.source=..."
        )
    if not workdir or not os.path.exists(os.path.join(workdir, "config.json")):
        raise UserError(f"--workdir={workdir} holds no config.json: give the run directory of pretrainax.main")
    experiment = load(os.path.join(workdir, "config.json"))
    _check_fields(experiment, argv)
    _register_choices()
    config_flags.DEFINE_config_dataclass("config", experiment, allow_override=True)


def _check_config_flags(argv: list[str]) -> None:
    """Finds a missing file, a bad variant or an unknown field, which ml_collections reports with a traceback."""
    pairs = zip(argv, [*argv[1:], ""], strict=True)  # --config=FILE or --config FILE
    values = [a.partition("=")[2] or after for a, after in pairs if a.lstrip("-").split("=")[0] == "config"]
    for value in values:
        file, _, variant = value.partition(":")
        if not os.path.isfile(file):
            folder = os.path.dirname(file) or "."
            there = [os.path.join(folder, f) for f in os.listdir(folder)] if os.path.isdir(folder) else []
            there = [f for f in there if f.endswith(".py")]
            raise UserError(
                f"no config file {file!r}, {nearest(file, there) if there else 'nor another in its folder'}"
            )
        _check_fields(runpy.run_path(file)["get_config"](variant), argv)


def _check_fields(experiment: Experiment, argv: list[str]) -> None:
    """Raises UserError for a flag of a field that the config does not have."""
    for path in (a.split("=")[0].partition("config.")[2] for a in argv if a.lstrip("-").startswith("config.")):
        node, done = experiment, "config"
        for name in path.split("."):
            fields = getattr(node, "__dataclass_fields__", ())
            if name not in fields:
                raise UserError(f"{done} has no field {name!r}, {nearest(name, fields)}")
            node, done = getattr(node, name), f"{done}.{name}"
