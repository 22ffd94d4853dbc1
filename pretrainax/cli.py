"""Shared code of all commands: the common flags, such as --config and --quiet, one-line errors, and exit codes.

Does not import JAX: data-loader workers re-import the command's module, so the import must stay fast.
"""

import atexit
import contextlib
import errno
import functools
import gc
import itertools
import json
import logging as python_logging
import math
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

from absl import app, flags, logging

import pretrainax
from pretrainax.config import Experiment, RunFailed, UserError, ledger, nearest
from pretrainax.config.config_file import find_config, read_config_file
from pretrainax.config.overrides import FLAG, apply_overrides, fields_named, split_overrides
from pretrainax.config.reference import docstring_of
from pretrainax.config.validation import complete, validate
from pretrainax.files.errors import printable
from pretrainax.files.paths import define_path, is_path, is_url, is_utf8
from pretrainax.reporting import config_reference
from pretrainax.reporting.streams import keep_streams
from pretrainax.storage import places
from pretrainax.trackers.secrets import masked


class _ConfigParser(flags.ArgumentParser):
    """Parses the value of --config into a config; `_parse` then applies the flags that override its fields."""

    config_argument = ""  # value of --config
    init_from: Optional[str] = None  # value of --config.checkpoint.init_from, which some configs read
    overridden: tuple[str, ...] = ()  # paths of fields that flags override: "train.steps"

    def parse(self, argument: str) -> Experiment:
        self.config_argument = argument
        return read_config_file(argument, self.init_from)


_CONFIG_PARSER = _ConfigParser()
CONFIG = flags.DEFINE(
    _CONFIG_PARSER,
    "config",
    None,
    "Name and variant of a config, such as t5_base:large, or a Python file with get_config(variant)",
)
WORKDIR = define_path(
    "workdir", None, "Folder of the run; by default, training writes to the new folder runs/<config>-<time>"
)
# Errors of the file system, not of the program, such as a full disk, denied access, or a file where a folder should be.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM)
_DISK_ERRORS += (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_OPEN_FILE_ERRORS = (errno.EMFILE, errno.ENFILE)
# Imports and tracing create many objects and few reference cycles. With Python's default thresholds, garbage collection
# takes a twelfth of the time until the first step.
_GC_THRESHOLDS = (50_000, 20, 50)  # arguments of gc.set_threshold
_MAX_MESSAGE_LENGTH = 4000  # maximum number of characters of an error message
_CLEANUP_SECONDS = 20  # seconds until a failed command exits, even if threads are still running
HELP = ("-h", "-?", "-help", "--help", "--helpshort")
DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of an error in the config or input instead of one line")
QUIET = flags.DEFINE_bool("quiet", False, "Print only results and errors")
VERBOSE = flags.DEFINE_bool(
    "verbose",
    False,
    "Print debug messages, and show tracebacks as --debug does; with --seeds or --sweep also all output of each run, "
    "which otherwise goes to WORKDIR/NAME.log",
)
_VERSION = flags.DEFINE_bool("version", False, "Print the version and exit")
RUN_FLAGS = ("config", "workdir")
COMMON_FLAGS = ("debug", "quiet", "verbose", "version")
COMPLETE = "--complete"  # prints the words that a shell may complete; not in --help, because only shells use it


def run(
    main: Callable[..., int],
    commands: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
    config: Optional[Callable[[], Optional[Experiment]]] = None,
    texts: bool = False,
    trains: bool = False,
    has_json: bool = False,
    run_flags: Sequence[str] = RUN_FLAGS,
) -> None:
    """Parses the flags, calls `main`, and exits with its exit code; prints a UserError as one line and exits with 2.

    Args:
      main: the command; it receives the positional arguments.
      commands: {subcommand: flags that not all subcommands read}; `main` receives the subcommand.
      config: for commands that do not take --config=FILE: a function that returns the config whose fields flags may
        override, or None.
      texts: whether the command takes any number of positional arguments, rather than at most a subcommand.
      trains: whether `main` itself handles a --workdir that is an object-store URL.
      has_json: whether the command has the flag --json, which `main` reads with `prints_json`.
      run_flags: the RUN_FLAGS that the command takes.
    """

    def run_main(arguments: list[str]) -> int:
        try:
            with _local_copies(trains), _silence() if QUIET.value else contextlib.nullcontext():
                return main(*arguments[1:])
        except UserError as e:
            if DEBUG.value:
                raise
            return report_error(e)
        except KeyboardInterrupt:  # outside a `PreemptionHandler`: while a run is prepared, and in other commands
            print("\npretrainax: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
        except RuntimeError as e:
            if DEBUG.value or "can't start new thread" not in str(e):
                raise
            limits = "`ulimit -u`, or the process limit of the container"
            return report_error(RunFailed(f"no further thread can be started: raise {limits}"))
        except OSError as e:
            if DEBUG.value or e.errno not in (*_DISK_ERRORS, *_OPEN_FILE_ERRORS):
                raise
            if e.errno in _OPEN_FILE_ERRORS:
                return report_error(RunFailed(f"{e.strerror}: raise `ulimit -n`, the limit on open files"))
            location = e.filename or "stdout or a file"
            return report_error(RunFailed(f"{location}: {e.strerror}; fix this and run the same command again"))

    gc.set_threshold(*_GC_THRESHOLDS)
    keep_streams()
    atexit.register(_skip_finalization)  # exit handlers run in reverse order, so this one is the last
    sys.unraisablehook = _show_unraisable
    command_flags = flags.FLAGS.get_flags_for_module(main.__module__)  # these and the common flags appear in --help
    command_flags += [flags.FLAGS[name] for name in (*run_flags, *COMMON_FLAGS)]
    if has_json:
        command_flags.append(flags.FLAGS[flags.DEFINE_bool("json", False, "Print the results as JSON to stdout").name])
    for flag in command_flags:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    # --help shows the docstring of __main__. If that is empty, show the docstring of the module that defines `main`.
    program = sys.modules["__main__"]
    program.__doc__ = program.__doc__ or sys.modules[main.__module__].__doc__
    app.run(run_main, flags_parser=functools.partial(_parse, commands=commands, config=config, texts=texts))


def parse_again(words: Sequence[str]) -> None:
    """Replaces the arguments of this process, and parses them; flags that they lack keep their values."""
    sys.argv[1:] = words
    _parse(sys.argv, {}, None, False)


@contextlib.contextmanager
def _local_copies(trains: bool) -> Iterator[None]:
    """Replaces object-store URLs in flags with paths of local copies; uploads new files when the context exits.

    trains: whether to leave --workdir unchanged, because `main` itself handles a URL.
    """
    with contextlib.ExitStack() as stack:
        for name in flags.FLAGS:
            flag = flags.FLAGS[name]
            if flag.value and is_path(flag) and is_url(flag.value) and not (trains and name == "workdir"):
                flag.value = stack.enter_context(places.uploaded_output(flag.value))
        yield


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discards what Python code prints to stderr: headers, progress and warnings, but not results and errors."""
    logging.set_verbosity(logging.ERROR)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # of XLA's messages, only errors
    with open(os.devnull, "w") as devnull, contextlib.redirect_stderr(devnull):
        yield


def _show_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Prints exceptions that Python cannot raise, such as exceptions in destructors.

    Hides "Event loop is closed", except with --debug. TensorStore callbacks cause this exception if they arrive after a
    failed save, when their asyncio loop is already closed. The error of the save itself is printed separately.
    """
    if str(unraisable.exc_value) != "Event loop is closed" or DEBUG.value:  # DEBUG.value needs parsed flags
        sys.__unraisablehook__(unraisable)


def experiment(files: bool = True) -> Experiment:
    """Returns the validated config that --config names, with flag overrides applied.

    Args:
      files: whether to also check that the files of the dataset and the tokenizer exist.

    Raises:
      UserError: --config is missing or invalid.
    """
    if CONFIG.value is None:
        raise UserError("--config is missing; for a first run: --config=quickstart")
    complete(CONFIG.value)
    validate(CONFIG.value, files)
    return CONFIG.value


def overrides() -> tuple[str, ...]:
    """Returns the paths of the config fields that flags override, such as "train.steps"."""
    return _CONFIG_PARSER.overridden


def config_name() -> str:
    """Returns the config's name and variant: `t5_base-large` for t5_base:large, `dna-full` for dna/config.py:full."""
    file, variant = find_config(_CONFIG_PARSER.config_argument)
    folder, name = os.path.split(os.path.abspath(file))
    name = os.path.basename(folder) if name == "config.py" else name.removesuffix(".py")
    return "-".join(filter(None, (name, variant)))


def paper_source() -> str:
    """Returns the data source that the config's paper uses, in config syntax.

    The config file's docstring gives this source as --config.data.source="…". Returns "" if it does not.
    """
    match = re.search(r'--config\.data\.source="([^"]+)"', docstring_of(find_config(_CONFIG_PARSER.config_argument)[0]))
    return " ".join(match[1].split()).replace("( ", "(").replace(" )", ")") if match else ""


def compare_with_ledger(experiment: Optional[Experiment] = None) -> Optional[ledger.Comparison]:
    """Compares a config with its ledger; returns None if it has no ledger.

    The ledger is the .toml file next to the config file, which gives the source of each number.

    experiment: the config to compare. If None, compares the config that --config names, with flag overrides.
    """
    file, variant = find_config(_CONFIG_PARSER.config_argument)
    path = ledger.ledger_path(file)
    return ledger.compare(experiment or CONFIG.value, path, variant) if os.path.exists(path) else None


def deviations() -> str:
    """Summarizes, for the run header, how the config deviates from the published recipe that its ledger describes.

    Returns "" if the config has no ledger. An invalid ledger does not stop the run; the summary then contains the
    error.
    """
    try:
        comparison = compare_with_ledger()
    except UserError as e:
        return f"unknown: {e}"
    if comparison is None:
        return ""
    summary = comparison.summary() or "none"
    flag = shlex.quote(f"--config={_CONFIG_PARSER.config_argument}")
    return f"{summary}. Source of each number: python -m pretrainax.recipe {flag}"


def recipe_counts() -> str:
    """Counts, for the run header, the config's values by origin; returns "" without a valid ledger."""
    try:
        comparison = compare_with_ledger()
    except UserError:  # `deviations` contains the error
        return ""
    return comparison.counts() if comparison else ""


def report_error(error: Exception) -> int:
    """Prints an error as one line to stderr and returns its exit code.

    Also makes the process exit after 20 s, in case threads are still running.
    """
    print(f"pretrainax: {describe_error(error)}", file=sys.stderr, flush=True)
    code = getattr(error, "exit_code", UserError.exit_code)
    # At exit, Python waits for the threads of libraries, and a thread may block forever.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(code))
    signal.alarm(_CLEANUP_SECONDS)
    _failure_codes.append(code)
    return code


_failure_codes: list[int] = []  # the exit code of an error that `report_error` has printed


def _skip_finalization() -> None:
    """Exits at once after an error, when all other exit handlers have run.

    While Python destroys its modules, it has no signal handlers, so that the alarm of `report_error` would kill the
    process with status 142.
    """
    if _failure_codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_failure_codes[-1])


def prints_json() -> bool:
    """Returns whether the command has the flag --json and it is set."""
    return "json" in flags.FLAGS and flags.FLAGS.json


def print_json(value: object) -> None:
    """Prints a value as JSON to stdout. Numbers that JSON lacks (infinity, NaN) become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): finite(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def check_overrides(count: Sequence[str], where: str) -> None:
    """Raises UserError if a flag overrides a config field that has no effect in this command.

    Args:
      count: paths of the fields or field groups that do have an effect, such as "data.source" or "mesh".
      where: end of the error message, such as "in a validation".
    """
    ignored = [path for path in overrides() if not any(f"{path}.".startswith(f"{part}.") for part in count)]
    if ignored:
        others = f". These fields do: config.{', config.'.join(count)}" if count else ""
        raise UserError(f"--config.{ignored[0]} changes nothing {where}: leave it out{others}")


def describe_error(error: Exception) -> str:
    """Formats an error as one line, with secrets masked and unprintable characters replaced.

    Messages of more than 4,000 characters are truncated.
    """
    line = masked(printable(places.with_urls(str(error))))
    rest = len(line) - _MAX_MESSAGE_LENGTH
    return line if rest <= 0 else f"{line[:_MAX_MESSAGE_LENGTH]} … and {rest:,} more characters"


def _parse(
    argv: list[str],
    commands: Mapping[str, Sequence[str]],
    config: Optional[Callable[[], Optional[Experiment]]],
    texts: bool,
) -> list[str]:
    """Parses flags and config overrides, and returns the program name and the positional arguments."""
    logging.use_absl_handler()
    logging.set_verbosity(logging.WARNING)
    try:
        for word in argv:
            if not is_utf8(word):
                raise UserError(f"{word} is not UTF-8: rename the file or folder")
        arguments, settings = split_overrides(flags.FLAGS.read_flags_from_files(argv))
        _CONFIG_PARSER.init_from = dict(settings).get("config.checkpoint.init_from")
        wants_help = any(word in HELP for word in arguments)
        if COMPLETE in arguments:
            from pretrainax.completion import flag_words  # local import, because only shells need it

            print(*commands, *flag_words(config is not None or "config" in _key_flags()), sep="\n")
            sys.exit(0)
        remaining = flags.FLAGS([word for word in arguments if word not in HELP], known_only=True)
        if _VERSION.value:
            print(f"pretrainax {pretrainax.__version__}")
            sys.exit(0)
        _set_verbosity()
        for name in RUN_FLAGS[config is not None :]:  # `_command_config` refuses --config
            if flags.FLAGS[name].present and name not in _key_flags():
                hint = "set --from=DIR to the run or directory" if "from" in _key_flags() else "leave it out"
                raise UserError(f"--{name} is not for this command: {hint}")
        if config is not None and not (wants_help and len(arguments) == 2):  # --help alone needs no model
            for word in remaining[1:]:
                _check_argument(word)
            flags.FLAGS.config = _command_config(config, wants_help)
        if settings and CONFIG.value is None:
            reason = "--config is missing" if "config" in _key_flags() else "this command has no config"
            reason = reason if config is None else "this model has no training config"
            raise UserError(f"{reason}, so --{settings[0][0]} cannot set a field")
        if CONFIG.value is not None:
            apply_overrides(CONFIG.value, settings)
        _CONFIG_PARSER.overridden = tuple(path.removeprefix("config.") for path, _ in settings)
        if wants_help:
            _print_help()
            sys.exit(0)
        if texts:
            return _positional_arguments(remaining)
        remaining = [word for word in remaining if word != "--"]
        for word in remaining[1:]:
            _check_argument(word)
        if commands:
            _check_subcommand(commands, "".join(remaining[1:2]))
        if len(remaining) > 1 + bool(commands):
            raise UserError(f"unexpected argument {remaining[1 + bool(commands)]!r}; flags look like --config=FILE")
        return remaining
    except (flags.Error, UserError) as e:
        if "--debug" in argv or "--verbose" in argv:
            raise
        if isinstance(e, flags.Error):  # whose message about a boolean contains a tuple
            e = UserError(re.sub(r"\('Non-boolean argument.*", "it must be true or false", str(e)))
        sys.exit(report_error(e))


def _check_subcommand(commands: Mapping[str, Sequence[str]], command: str) -> None:
    """Raises UserError for an unknown subcommand, or for a flag that only other subcommands read."""
    if command not in commands:
        raise UserError(f"the first argument must be {' or '.join(commands)}; got {command or 'nothing'!r}")
    for name in itertools.chain(*commands.values()):
        if flags.FLAGS[name].present and name not in commands[command]:
            readers = " and ".join(reader for reader, names in commands.items() if name in names)
            raise UserError(f"--{name} is for {readers}: leave it out")


def _key_flags() -> list[str]:
    """Returns the names of the flags that the command takes."""
    return [flag.name for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])]


def _set_verbosity() -> None:
    """Applies --verbose; `_silence` applies --quiet."""
    if QUIET.value and VERBOSE.value:
        raise UserError("--quiet and --verbose contradict each other: leave one of them out")
    if VERBOSE.value:
        flags.FLAGS.debug = True
        logging.set_verbosity(logging.DEBUG)
        for library in ("jax", "matplotlib"):  # they print thousands of debug messages
            python_logging.getLogger(library).setLevel(python_logging.INFO)


def _positional_arguments(arguments: list[str]) -> list[str]:
    """Returns the program name and the positional arguments, including all arguments after "--".

    Raises:
      UserError: an argument before "--" is an unknown flag.
    """
    before_separator = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for word in before_separator[1:]:
        if FLAG.match(word):
            _check_argument(word)
    return [*before_separator, *arguments[len(before_separator) + 1 :]]


def _check_argument(word: str) -> None:
    """Raises UserError for an unknown flag, or for a config field without its prefix (--train.steps, steps=5)."""
    name, equals, value = word.lstrip("-").partition("=")
    if not (FLAG.match(word) or equals):
        return
    paths = fields_named(name, CONFIG.value) if CONFIG.value else []
    if not paths and name.partition(".")[0] in Experiment.__dataclass_fields__:
        paths = [f"config.{name}"]
    if paths:
        raise UserError(f"{word}: the flag for this field is --{paths[0]}={value or '…'}")
    if FLAG.match(word):
        raise UserError(f"unknown flag --{name}, {nearest(name, _key_flags())}")


def _command_config(config: Callable[[], Optional[Experiment]], wants_help: bool) -> Optional[Experiment]:
    """Returns the config of a command that does not take --config=FILE, by calling `config`.

    With --help, returns None if `config` raises UserError, so that the help text is still printed.

    Raises:
      UserError: --config is given, or `config` raises UserError without --help.
    """
    if CONFIG.value is not None:
        raise UserError(
            "--config=FILE is not for this command, which reads the config of the run in --from or --workdir; flags "
            "override single fields, such as --config.data.source=..."
        )
    try:
        return config()
    except UserError:
        if wants_help:
            return None
        raise


def _print_help() -> None:
    """Prints the docstring and flags of a command; with --config, also the docstring and every field of the config."""
    app.usage(shorthelp=True, writeto_stdout=True)
    print("\nPages such as docs/guide.md are in https://github.com/pretrainax/pretrainax.")
    if CONFIG.value is None:
        fields = "With --config=FILE, --help shows every field of that config. " if "config" in _key_flags() else ""
        print(f"\n{fields}`pretrainax --help` lists all commands.")
        return
    if _CONFIG_PARSER.config_argument:
        file, _ = find_config(_CONFIG_PARSER.config_argument)
        print(f"\n{file}\n\n{textwrap.indent(docstring_of(file), '  ')}\n")
    print(config_reference.format_config(CONFIG.value, min(shutil.get_terminal_size().columns, 120)))
