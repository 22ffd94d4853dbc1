"""Shared code of all commands: the flags --config, --workdir and --debug, errors in one line, and exit codes.

Does not import JAX: loader workers import the command's module again and must stay light.
"""

import contextlib
import errno
import functools
import gc
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Optional

from absl import app, flags, logging

from pretrainax.config import Experiment, RunFailed, UserError, ledger, nearest
from pretrainax.config.config_file import find_config, read_config_file
from pretrainax.config.overrides import fields_named, set_field
from pretrainax.config.reference import docstring_of
from pretrainax.config.validation import complete, validate
from pretrainax.files.errors import printable
from pretrainax.files.paths import define_path, is_path, is_url, is_utf8
from pretrainax.reporting import config_reference
from pretrainax.reporting.streams import keep_streams
from pretrainax.storage import places
from pretrainax.trackers.secrets import masked


class _ConfigParser(flags.ArgumentParser):
    """Builds the config from the file of --config; `_parse` applies the flags that override fields."""

    given = ""  # value of --config
    init_from: Optional[str] = None  # value of --config.checkpoint.init_from, which some configs read
    overridden: tuple[str, ...] = ()  # paths of fields that flags override: "train.steps"

    def parse(self, argument: str) -> Experiment:
        self.given = argument
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
# Errors of the disk, not of the program: it is full, access is denied, or a file exists where a folder is needed.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM)
_DISK += (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_FILES = (errno.EMFILE, errno.ENFILE)
# Imports and tracing make many objects and few reference cycles: garbage collection at Python's default thresholds
# takes a twelfth of the time until the first step.
_GC_THRESHOLDS = (50_000, 20, 50)  # arguments of gc.set_threshold
_LINE = 4000  # maximum number of characters of an error message
_LAST = 20  # seconds for which a failed command may clean up before it exits
_FLAG = re.compile(r"--?[a-zA-Z]")  # does not match negative numbers
_OVERRIDE = re.compile(r"--?(no)?(config\.[^=]*)(?:=(.*))?", re.DOTALL)
_HELP = ("-h", "-?", "-help", "--help", "--helpshort")
DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of an error in the config or input instead of one line")


def run(
    main: Callable[..., int],
    commands: tuple[str, ...] = (),
    config: Optional[Callable[[], Optional[Experiment]]] = None,
    texts: bool = False,
    trains: bool = False,
) -> None:
    """Parses the flags, calls `main`, and exits with the exit code that `main` returns.

    An error is printed in one line; a UserError exits with code 2.

    Args:
      commands: allowed subcommands; the first argument must be one of them, and `main` receives it.
      config: returns the config that flags override, for a command without --config=FILE; it may return None. It is
        called after all other flags are parsed.
      texts: `main` receives the arguments that are not flags.
      trains: `main` handles a --workdir in an object store itself.
    """

    def guarded(words: list[str]) -> int:
        try:
            with _local_copies(trains):
                return main(*words[1:])
        except UserError as e:
            if DEBUG.value:
                raise
            return report_error(e)
        except KeyboardInterrupt:  # outside of a `PreemptionHandler`: while a run prepares, and in other commands
            print("\npretrainax: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
        except RuntimeError as e:
            if DEBUG.value or "can't start new thread" not in str(e):
                raise
            return report_error(
                RunFailed("no further thread can be started: raise `ulimit -u`, or the process limit of the container")
            )
        except OSError as e:
            if DEBUG.value or e.errno not in (*_DISK, *_FILES):
                raise
            if e.errno in _FILES:
                return report_error(RunFailed(f"{e.strerror}: raise `ulimit -n`, the limit on open files"))
            where = e.filename or "a file could not be read or written"
            return report_error(RunFailed(f"{where}: {e.strerror}; fix this and run the same command again"))

    gc.set_threshold(*_GC_THRESHOLDS)
    keep_streams()
    sys.unraisablehook = _show_unraisable
    own = flags.FLAGS.get_flags_for_module(main.__module__)
    for flag in (flags.FLAGS["config"], flags.FLAGS["workdir"], flags.FLAGS["debug"], *own):  # what --help shows
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    # absl shows the docstring of __main__; `main` may be defined in another module than the command.
    program = sys.modules["__main__"]
    program.__doc__ = program.__doc__ or sys.modules[main.__module__].__doc__
    app.run(guarded, flags_parser=functools.partial(_parse, commands=commands, config=config, texts=texts))


@contextlib.contextmanager
def _local_copies(trains: bool) -> Iterator[None]:
    """Replaces object-store URLs in flags by local copies inside the context, and uploads new files at the end.

    trains: True leaves --workdir unchanged, because `main` handles a URL itself.
    """
    with contextlib.ExitStack() as stack:
        for name in flags.FLAGS:
            flag = flags.FLAGS[name]
            if flag.value and is_path(flag) and is_url(flag.value) and not (trains and name == "workdir"):
                flag.value = stack.enter_context(places.uploaded_output(flag.value))
        yield


def _show_unraisable(raised: "sys.UnraisableHookArgs") -> None:
    """Shows exceptions that Python cannot raise, for example those of library threads.

    It hides one exception: after a failed save, whose error is printed separately, callbacks of TensorStore still
    arrive, but their asyncio loop is closed.
    """
    if str(raised.exc_value) != "Event loop is closed" or DEBUG.value:  # DEBUG is unknown before flags are parsed
        sys.__unraisablehook__(raised)


def experiment(files: bool = True) -> Experiment:
    """Returns the validated config of --config, with the fields that flags override.

    Args:
      files: True also requires that the files of the dataset and the tokenizer exist.

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


def folder(flag: str, path: str) -> str:
    """Creates the folder that a flag names, before slow work that writes results there. Returns its path.

    Raises:
      UserError: the folder cannot be created.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as e:
        raise UserError(f"--{flag}={path} cannot be written: {e.strerror}") from e
    return path


def config_name() -> str:
    """Returns the name of the config: `t5_base-large` for --config=t5_base:large."""
    file, variant = find_config(_CONFIG_PARSER.given)
    return "-".join(filter(None, (os.path.basename(file).removesuffix(".py"), variant)))


def paper_source() -> str:
    """Returns the dataset of the paper, or "" if it is unknown.

    The dataset is the value of --config.data.source in the docstring of the config file.
    """
    found = re.search(r'--config\.data\.source="([^"]+)"', docstring_of(find_config(_CONFIG_PARSER.given)[0]))
    return " ".join(found[1].split()).replace("( ", "(").replace(" )", ")") if found else ""


def compare_with_ledger(experiment: Optional[Experiment] = None) -> Optional[ledger.Comparison]:
    """Compares the config with the ledger, the .toml file next to the config file; returns None without a ledger.

    experiment: the config to compare; None: --config with its overrides.
    """
    file, variant = find_config(_CONFIG_PARSER.given)
    path = ledger.ledger_path(file)
    return ledger.compare(experiment or CONFIG.value, path, variant) if os.path.exists(path) else None


def deviations() -> str:
    """Returns a summary of the deviations of the config from its source, for the header; "" without a ledger.

    If the .toml file of the config is not a valid ledger, the run continues, and the summary has the error.
    """
    try:
        compared = compare_with_ledger()
    except UserError as e:
        return f"unknown: {e}"
    if compared is None:
        return ""
    summary = compared.summary() or "none"
    return f"{summary}. Source of each number: python -m pretrainax.recipe --config={_CONFIG_PARSER.given}"


def report_error(error: Exception) -> int:
    """Prints an error as one line and returns the exit code for this error.

    The process ends after at most 20 s, even if threads are still running.
    """
    print(f"pretrainax: {describe_error(error)}", file=sys.stderr, flush=True)
    code = getattr(error, "exit_code", UserError.exit_code)
    # Python waits for the threads of libraries at exit, and a thread may wait forever.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(code))
    signal.alarm(_LAST)
    return code


def check_overrides(count: Sequence[str], where: str) -> None:
    """Raises UserError if a flag overrides a config field that has no effect in this command.

    Args:
      count: fields or whole parts of the config that have an effect: "data.source", "mesh".
      where: end of the error message: "in a validation".
    """
    ignored = [path for path in overrides() if not any(f"{path}.".startswith(f"{part}.") for part in count)]
    if ignored:
        others = f". These fields do: config.{', config.'.join(count)}" if count else ""
        raise UserError(f"--config.{ignored[0]} changes nothing {where}: leave it out{others}")


def describe_error(error: Exception) -> str:
    """Returns the message of an error as one line, without control characters and secrets.

    The text after the first 4,000 characters is cut.
    """
    line = masked(printable(places.with_urls(str(error))))
    return line if len(line) <= _LINE else f"{line[:_LINE]} … and {len(line) - _LINE:,} more characters"


def _parse(
    argv: list[str], commands: tuple[str, ...], config: Optional[Callable[[], Optional[Experiment]]], texts: bool
) -> list[str]:
    logging.use_absl_handler()
    logging.set_verbosity(logging.WARNING)
    try:
        for word in argv:
            if not is_utf8(word):
                raise UserError(f"{word} is not UTF-8: rename the file or folder")
        words, settings = _take_overrides(flags.FLAGS.read_flags_from_files(argv))
        _CONFIG_PARSER.init_from = dict(settings).get("config.checkpoint.init_from")
        wants_help = any(word in _HELP for word in words)
        rest = flags.FLAGS([word for word in words if word not in _HELP], known_only=True)
        if config is not None:
            for word in rest[1:]:
                _check_word(word)
            flags.FLAGS.config = _config_instead(config, wants_help)
        if settings and CONFIG.value is None:
            reason = "--config is missing" if config is None else "this model has no training config"
            raise UserError(f"{reason}, so --{settings[0][0]} cannot set a field")
        for path, text in settings:
            set_field(CONFIG.value, path, text)
        _CONFIG_PARSER.overridden = tuple(path.removeprefix("config.") for path, _ in settings)
        if wants_help:
            _help()
            sys.exit(0)
        if texts:
            return _texts(rest)
        rest = [word for word in rest if word != "--"]
        for word in rest[1:]:
            _check_word(word)
        if commands and rest[1:2] not in [[command] for command in commands]:
            raise UserError(
                f"the first argument must be {' or '.join(commands)}; got {' '.join(rest[1:2]) or 'nothing'!r}"
            )
        if len(rest) > 1 + bool(commands):
            raise UserError(f"unexpected argument {rest[1 + bool(commands)]!r}; flags look like --config=FILE")
        return rest
    except (flags.Error, UserError) as e:
        if "--debug" in argv:
            raise
        sys.exit(report_error(e))


def _take_overrides(argv: list[str]) -> tuple[list[str], list[tuple[str, Optional[str]]]]:
    """Splits command-line arguments into arguments for absl and overrides, such as ("config.train.steps", "5")."""
    words, overrides, rest = [], [], list(argv)
    while rest:
        word = rest.pop(0)
        match = _OVERRIDE.fullmatch(word)
        if match is None:
            words.append(word)
            continue
        off, path, text = match.groups()
        if off and text is not None:
            raise UserError(f"{word}: --no… takes no value; write --{path}={text}")
        if text is None and not off and rest and not _FLAG.match(rest[0]):
            text = rest.pop(0)
        overrides.append((path, "false" if off else text))
    return words, overrides


def _texts(rest: list[str]) -> list[str]:
    """Returns the program name and the arguments that are not flags.

    Raises:
      UserError: an unknown flag, unless it follows "--".
    """
    given = rest[: rest.index("--")] if "--" in rest else rest
    for word in given[1:]:
        if _FLAG.match(word):
            _check_word(word)
    return [*given, *rest[len(given) + 1 :]]


def _check_word(word: str) -> None:
    """Raises UserError if an argument is an unknown flag, or a config field without prefix: --train.steps, steps=5."""
    name, equals, value = word.lstrip("-").partition("=")
    if not (_FLAG.match(word) or equals):
        return
    places = fields_named(name, CONFIG.value) if CONFIG.value else []
    if not places and name.partition(".")[0] in Experiment.__dataclass_fields__:
        places = [f"config.{name}"]
    if places:
        raise UserError(f"{word}: the flag for this field is --{places[0]}={value or '…'}")
    if _FLAG.match(word):
        known = [flag.name for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])]
        raise UserError(f"unknown flag --{name}, {nearest(name, known)}")


def _config_instead(config: Callable[[], Optional[Experiment]], wants_help: bool) -> Optional[Experiment]:
    """Returns the config that flags override, for a command that takes no --config=FILE.

    Raises:
      UserError: --config is given.
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


def _help() -> None:
    """Prints the docstring and flags of a command; with a config also the docstring of its file and every field."""
    app.usage(shorthelp=True, writeto_stdout=True)
    if CONFIG.value is None:
        print("\nWith --config=FILE, --help shows every field of that config. `pretrainax --help` lists all commands.")
        return
    if _CONFIG_PARSER.given:
        file, _ = find_config(_CONFIG_PARSER.given)
        print(f"\n{file}\n\n{textwrap.indent(docstring_of(file), '  ')}\n")
    print(config_reference.format_config(CONFIG.value, min(shutil.get_terminal_size().columns, 120)))
