"""The part that all commands share: the flags --config and --debug, one clear line for a mistake, exit codes.

Imports no JAX: loader workers import the command's module again and must stay light.
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
    """Reads the file of --config; `_parse` sets the fields of what it returns."""

    given = ""  # the flag's value
    init_from: Optional[str] = None  # that of --config.checkpoint.init_from, which some configs begin with
    overridden: tuple[str, ...] = ()  # fields that further flags set: "train.steps"

    def parse(self, argument: str) -> Experiment:
        self.given = argument
        return read_config_file(argument, self.init_from)


_CONFIG_PARSER = _ConfigParser()
CONFIG = flags.DEFINE(
    _CONFIG_PARSER, "config", None, "A config by its name, as t5_base:large, or a file with get_config(variant)"
)
WORKDIR = define_path("workdir", None, "Run directory; of a new run where not given: runs/<config>-<time>")
# What a disk has, and no program: no room, no right, a file in place of a folder or a folder in place of a file.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM)
_DISK += (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_FILES = (errno.EMFILE, errno.ENFILE)
# Imports and tracing make many objects and few circles: to look for these as often as Python does takes a twelfth of
# the time until the first step.
_SELDOM = (50_000, 20, 50)  # of gc.set_threshold
_LINE = 4000  # characters of an error
_LAST = 20  # seconds in which a command that has failed may tidy up
_FLAG = re.compile(r"--?[a-zA-Z]")  # and no negative number
_OVERRIDE = re.compile(r"--?(no)?(config\.[^=]*)(?:=(.*))?", re.DOTALL)
_HELP = ("-h", "-?", "-help", "--help", "--helpshort")
DEBUG = flags.DEFINE_bool("debug", False, "Show the traceback of a bad config or input")


def run(
    main: Callable[..., int],
    commands: tuple[str, ...] = (),
    config: Optional[Callable[[], Optional[Experiment]]] = None,
    texts: bool = False,
    trains: bool = False,
) -> None:
    """Parses the flags, calls `main` and exits with what it returns, or with 2 after one line on a UserError.

    Args:
      commands: the first word after the program's name is one of them, and what `main` is called with.
      config: gives the config that flags override, of a command that takes no --config=FILE; None where there is none.
        It is called when all other flags are known.
      texts: words beside the flags are texts, which `main` is called with.
      trains: `main` itself takes a --workdir of an object store.
    """

    def guarded(words: list[str]) -> int:
        try:
            with _kept_here(trains):
                return main(*words[1:])
        except UserError as e:
            if DEBUG.value:
                raise
            return complain(e)
        except KeyboardInterrupt:  # where no `PreemptionHandler` is at work: while a run prepares, in other commands
            print("\npretrainax: interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
        except RuntimeError as e:
            if DEBUG.value or "can't start new thread" not in str(e):
                raise
            return complain(RunFailed("no further thread can be started: raise `ulimit -u`, or the container's limit"))
        except OSError as e:
            if DEBUG.value or e.errno not in (*_DISK, *_FILES):
                raise
            if e.errno in _FILES:
                return complain(RunFailed(f"{e.strerror}: raise `ulimit -n`, the limit on them"))
            where = e.filename or "a file that cannot be read or written"
            return complain(RunFailed(f"{where}: {e.strerror}; when that is mended, run the same command again"))

    gc.set_threshold(*_SELDOM)
    keep_streams()
    sys.unraisablehook = _show_unraisable
    own = flags.FLAGS.get_flags_for_module(main.__module__)
    for flag in (flags.FLAGS["config"], flags.FLAGS["workdir"], flags.FLAGS["debug"], *own):  # what --help shows
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    sys.modules["__main__"].__doc__ = sys.modules[main.__module__].__doc__
    app.run(guarded, flags_parser=functools.partial(_parse, commands=commands, config=config, texts=texts))


@contextlib.contextmanager
def _kept_here(trains: bool) -> Iterator[None]:
    """Brings what flags name in object stores to this machine, and sends what is new there at the end."""
    with contextlib.ExitStack() as stack:
        for name in flags.FLAGS:
            flag = flags.FLAGS[name]
            if flag.value and is_path(flag) and is_url(flag.value) and not (trains and name == "workdir"):
                flag.value = stack.enter_context(places.sent(flag.value))
        yield


def _show_unraisable(raised: "sys.UnraisableHookArgs") -> None:
    """Shows what a thread of a library could raise to nobody, but for the echo of a failed save, which has its line.

    Where a save fails, TensorStore's callbacks still come, and asyncio's loop that they are for is closed.
    """
    if str(raised.exc_value) != "Event loop is closed" or DEBUG.value:  # which is not known before flags are read
        sys.__unraisablehook__(raised)


def experiment(files: bool = True) -> Experiment:
    """Returns the config of --config with its overrides, validated.

    files: corpus and tokenizer must be there.
    """
    if CONFIG.value is None:
        raise UserError("--config is missing; for a first run: --config=quickstart")
    complete(CONFIG.value)
    validate(CONFIG.value, files)
    return CONFIG.value


def overrides() -> tuple[str, ...]:
    """Returns the fields of the config that flags set: "train.steps"."""
    return _CONFIG_PARSER.overridden


def folder(flag: str, path: str) -> str:
    """Makes the folder that a flag names, before the work whose results it is for."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as e:
        raise UserError(f"--{flag}={path} cannot be written: {e.strerror}") from e
    return path


def config_name() -> str:
    """Names the config: `t5_base-large` for --config=t5_base:large."""
    file, variant = find_config(_CONFIG_PARSER.given)
    return "-".join(filter(None, (os.path.basename(file).removesuffix(".py"), variant)))


def papers_source() -> str:
    """Returns what the docstring of the config file gives to --config.data.source: the text of the paper; else ""."""
    found = re.search(r'--config\.data\.source="([^"]+)"', docstring_of(find_config(_CONFIG_PARSER.given)[0]))
    return " ".join(found[1].split()).replace("( ", "(").replace(" )", ")") if found else ""


def compare_with_ledger(experiment: Optional[Experiment] = None) -> Optional[ledger.Comparison]:
    """Returns the config, as flags have made it, beside the ledger of its file; None where that has none.

    experiment: of a run that was made by it, to stand in its place.
    """
    file, variant = find_config(_CONFIG_PARSER.given)
    beside = ledger.beside(file)
    return ledger.compare(experiment or CONFIG.value, beside, variant) if os.path.exists(beside) else None


def deviations() -> str:
    """Returns in what the config is not that of its source, and the command that says all; "" without a ledger.

    A file beside the config that is none may be for something else: it keeps no run from its start, and is named.
    """
    try:
        compared = compare_with_ledger()
    except UserError as e:
        return f"nobody knows: {e}"
    if compared is None:
        return ""
    return f"{compared.one_line() or 'none'}. Each number: python -m pretrainax.recipe --config={_CONFIG_PARSER.given}"


def complain(error: Exception) -> int:
    """Prints an error as one line; returns the exit code, with which the process ends soon whatever threads it has."""
    print(f"pretrainax: {one_line(error)}", file=sys.stderr, flush=True)
    code = getattr(error, "exit_code", UserError.exit_code)
    # Python waits for the threads of libraries, of which one may wait forever for another that never was.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(code))
    signal.alarm(_LAST)
    return code


def check_overrides(count: Sequence[str], where: str) -> None:
    """Raises UserError for a flag that sets a field of the config which changes nothing.

    Args:
      count: the fields that do, or whole parts of the config: "data.source", "mesh".
      where: they do so: "in a validation".
    """
    ignored = [path for path in overrides() if not any(f"{path}.".startswith(f"{part}.") for part in count)]
    if ignored:
        others = f". These do: config.{', config.'.join(count)}" if count else ""
        raise UserError(f"--config.{ignored[0]} changes nothing {where}: leave it out{others}")


def one_line(error: Exception) -> str:
    """Returns an error's text for a terminal: no line breaks, control characters or secrets, and not too long."""
    line = masked(printable(places.named(str(error))))
    return line if len(line) <= _LINE else f"{line[:_LINE]} … and {len(line) - _LINE:,} characters more"


def _parse(
    argv: list[str], commands: tuple[str, ...], config: Optional[Callable[[], Optional[Experiment]]], texts: bool
) -> list[str]:
    logging.use_absl_handler()
    logging.set_verbosity(logging.WARNING)
    try:
        for word in argv:
            if not is_utf8(word):
                raise UserError(f"{word}: not UTF-8; give the file or folder that it names another name")
        words, settings = _take_overrides(flags.FLAGS.read_flags_from_files(argv))
        _CONFIG_PARSER.init_from = dict(settings).get("config.checkpoint.init_from")
        asks_help = any(word in _HELP for word in words)
        rest = flags.FLAGS([word for word in words if word not in _HELP], known_only=True)
        if config is not None:
            for word in rest[1:]:
                _check_word(word)
            flags.FLAGS.config = _config_instead(config, asks_help)
        if settings and CONFIG.value is None:
            lacking = "--config is missing, of which" if config is None else "there is no config here of which"
            raise UserError(f"{lacking} --{settings[0][0]} sets a field")
        for path, text in settings:
            set_field(CONFIG.value, path, text)
        _CONFIG_PARSER.overridden = tuple(path.removeprefix("config.") for path, _ in settings)
        if asks_help:
            _help()
            sys.exit(0)
        if texts:
            return _texts(rest)
        rest = [word for word in rest if word != "--"]
        for word in rest[1:]:
            _check_word(word)
        if commands and rest[1:2] not in [[command] for command in commands]:
            raise UserError(f"say what to do first: {' or '.join(commands)}; got {' '.join(rest[1:2]) or 'nothing'!r}")
        if len(rest) > 1 + bool(commands):
            raise UserError(f"unexpected argument {rest[1 + bool(commands)]!r}; flags look like --config=FILE")
        return rest
    except (flags.Error, UserError) as e:
        if "--debug" in argv:
            raise
        sys.exit(complain(e))


def _take_overrides(argv: list[str]) -> tuple[list[str], list[tuple[str, Optional[str]]]]:
    """Parts a command line into words for absl and what sets fields: ("config.train.steps", "5") of --config.…=5."""
    words, overrides, rest = [], [], list(argv)
    while rest:
        word = rest.pop(0)
        match = _OVERRIDE.fullmatch(word)
        if match is None:
            words.append(word)
            continue
        off, path, text = match.groups()
        if off and text is not None:
            raise UserError(f"{word} takes no value: write --{path}={text}")
        if text is None and not off and rest and not _FLAG.match(rest[0]):
            text = rest.pop(0)
        overrides.append((path, "false" if off else text))
    return words, overrides


def _texts(rest: list[str]) -> list[str]:
    """Returns the program's name and the texts beside the flags; UserError for a flag that there is not, before --."""
    given = rest[: rest.index("--")] if "--" in rest else rest
    for word in given[1:]:
        if _FLAG.match(word):
            _check_word(word)
    return [*given, *rest[len(given) + 1 :]]


def _check_word(word: str) -> None:
    """Raises UserError for a flag that there is not; --train.steps and steps=5 lack the beginning of the field."""
    name, equals, value = word.lstrip("-").partition("=")
    if not (_FLAG.match(word) or equals):
        return
    places = fields_named(name, CONFIG.value) if CONFIG.value else []
    if not places and name.partition(".")[0] in Experiment.__dataclass_fields__:
        places = [f"config.{name}"]
    if places:
        raise UserError(f"{word}: the flag of this field is --{places[0]}={value or '…'}")
    if _FLAG.match(word):
        known = [flag.name for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])]
        raise UserError(f"unknown flag --{name}, {nearest(name, known)}")


def _config_instead(config: Callable[[], Optional[Experiment]], asks_help: bool) -> Optional[Experiment]:
    """Returns the config of a command that takes no file; UserError beside --config=FILE."""
    if CONFIG.value is not None:
        raise UserError(
            "--config=FILE is not for this command: it takes the config of the run that it is given, of which flags "
            "set single fields, as --config.data.source=..."
        )
    try:
        return config()
    except UserError:
        if asks_help:
            return None
        raise


def _help() -> None:
    """Prints what a command does and its flags; with a --config, what its file says and every field, as overridden."""
    app.usage(shorthelp=True, writeto_stdout=True)
    if CONFIG.value is None:
        print("With --config=FILE, --help shows every field of that config.")
        return
    if _CONFIG_PARSER.given:
        file, _ = find_config(_CONFIG_PARSER.given)
        print(f"\n{file}\n\n{textwrap.indent(docstring_of(file), '  ')}\n")
    print(config_reference.text(CONFIG.value, min(shutil.get_terminal_size().columns, 120)))
