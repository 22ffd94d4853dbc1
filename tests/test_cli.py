"""Tests behavior of all commands: errors of one line, the end of the process despite threads, --workdir."""

import ast
import re
import subprocess
import sys
import textwrap

import pytest

import pretrainax
from pretrainax import cli
from pretrainax.__main__ import MODULES
from tests.support.runs import ROOT


def run(program: str, *arguments) -> subprocess.CompletedProcess:
    """Runs a command with the given body of main."""
    imports = "from pretrainax import cli\nfrom pretrainax.config import RunFailed\n"
    code = f"{imports}{textwrap.dedent(program)}\ncli.run(main)"
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, timeout=60)


def test_a_command_that_has_failed_ends_though_a_thread_of_a_library_does_not():
    program = """
        import threading
        cli._CLEANUP_SECONDS = 1
        def main():
            threading.Thread(target=threading.Event().wait).start()
            raise RunFailed("it failed")
    """
    ended = run(program)
    assert ended.returncode == 1 and ended.stderr == b"pretrainax: it failed\n"


def test_a_command_that_has_failed_keeps_its_exit_code_while_python_ends():
    """While Python destroys its modules, it handles no signals, so an alarm would end the process with status 142."""
    program = """
        import time
        cli._CLEANUP_SECONDS = 1
        class Slow:
            def __del__(self, sleep=time.sleep):
                sleep(3)
        slow = Slow()
        def main():
            raise cli.UserError("a mistake")
    """
    ended = run(program)
    assert ended.returncode == 2 and ended.stderr == b"pretrainax: a mistake\n"


def test_a_command_that_has_failed_runs_its_exit_handlers_and_flushes():
    program = """
        import atexit, sys
        def main():
            atexit.register(lambda: print("handled"))
            sys.stdout.write("result ")
            raise cli.UserError("a mistake")
    """
    ended = run(program)
    assert ended.returncode == 2 and ended.stdout == b"result handled\n"


@pytest.mark.parametrize(
    "error, line",
    [
        ('RuntimeError("can\'t start new thread")', b"no further thread can be started: raise `ulimit -u`"),
        ("OSError(24, 'Too many open files')", b"Too many open files: raise `ulimit -n`"),
    ],
)
def test_a_machine_that_has_too_little_is_one_line(error, line):
    ended = run(f"def main():\n    raise {error}")
    assert ended.returncode == 1 and ended.stderr.startswith(b"pretrainax: " + line) and ended.stderr.count(b"\n") == 1


def test_a_workdir_is_at_home_and_utf_8():
    program = "def main():\n    print(cli.WORKDIR.value)"
    assert run(program, "--workdir=~/run").stdout.decode().startswith("/")
    assert run(program, "--workdir=~/run").stdout.endswith(b"/run\n")
    ended = run(program, b"--workdir=/tmp/\xff")
    assert ended.returncode == 2 and b"not UTF-8" in ended.stderr
    assert ended.stderr.count(b"\n") == 1


def imported_by(command: str, word: str) -> tuple[str, list[str]]:
    """Returns the output of `pretrainax COMMAND WORD`, and the slow packages that the command imports."""
    code = f"""
        import runpy, sys
        sys.argv = ["{command}", "{word}"]
        try:
            runpy.run_module("pretrainax.{MODULES[command]}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert not end.code
        print([m for m in ("jax", "flax", "optax", "orbax", "tensorflow", "grain", "matplotlib") if m in sys.modules])
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    out = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    text, _, modules = out.rpartition("\n")
    return text, ast.literal_eval(modules)


@pytest.mark.first(5)
@pytest.mark.parametrize("command", MODULES)
def test_help_imports_no_slow_package_and_lists_the_common_flags(command):
    text, modules = imported_by(command, "--help")
    assert modules == [] and all(f"--[no]{name}" in text for name in ("debug", "quiet", "verbose", "version"))


@pytest.mark.first(5)
@pytest.mark.parametrize("command", MODULES)
def test_the_words_that_a_shell_completes_are_the_flags_of_the_help(command):
    text, modules = imported_by(command, "--complete")
    words = {word.partition("=")[0] for word in text.splitlines()}
    assert modules == [] and {"--config", "--quiet", "--config.train.steps", "--config.data.source"} <= words
    helped = set(re.findall(r"^  --(?:\[no\])?([\w-]+):", imported_by(command, "--help")[0], re.MULTILINE))
    assert {f"--{name}" for name in helped} == {word for word in words if word.startswith("--") and "." not in word}


@pytest.mark.parametrize("command", ["train", "evaluate", "generate", "zoo", "huggingface"])
def test_every_command_prints_the_version(command):
    done = subprocess.run([sys.executable, "-m", "pretrainax", command, "--version"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and done.stdout.decode() == f"pretrainax {pretrainax.__version__}\n"


TALKS = """
    import sys
    from absl import logging
    def main():
        print("header", file=sys.stderr)
        logging.warning("a warning")
        logging.debug("a detail")
        print("result")
"""


def test_quiet_prints_results_and_errors_alone():
    ended = run(TALKS, "--quiet")
    assert ended.stdout == b"result\n" and ended.stderr == b""
    assert b"header" in run(TALKS).stderr and b"a detail" not in run(TALKS).stderr
    failed = run(f'{TALKS}        raise cli.UserError("a mistake")', "--quiet")
    assert failed.returncode == 2 and failed.stderr == b"pretrainax: a mistake\n"
    crashed = run(f"{TALKS}        raise ValueError", "--quiet")
    assert crashed.returncode == 1 and b"Traceback" in crashed.stderr and b"header" not in crashed.stderr


def test_verbose_prints_debug_messages_and_tracebacks():
    ended = run(f'{TALKS}        raise cli.UserError("a mistake")', "--verbose")
    assert b"a detail" in ended.stderr and b"Traceback" in ended.stderr


def test_quiet_and_verbose_contradict_each_other():
    assert b"--quiet and --verbose contradict each other" in run(TALKS, "--quiet", "--verbose").stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, said",
    [
        (["--config=gpt3"], "the source has batches that grow from 32,000 tokens"),
        (
            ["--config=shakespeare_char", "--config.train.steps=3"],
            "Other values here: train.steps. Source of each number: python -m",
        ),
        (
            ["--config=mistral", *(f"--config.train.{field}" for field in ("seed=3", "accumulate=2", "dtype=float32"))],
            "none. Source of each number",
        ),
        (["--config=mistral", "--config.optimizer=Lion(weight_decay=1)"], "Other values here: optimizer.type, "),
        (["--config=mistral"], "none. Source of each number: python -m pretrainax.recipe --config=mistral"),
        (["--config=tests/support/tiny.py:gpt"], "''"),
    ],
)
def test_deviations_are_those_of_the_ledger_and_of_the_flags(words, said):
    ended = run("def main():\n    return print(repr(cli.deviations()))", *words)
    assert said in ended.stdout.decode(), ended.stderr


@pytest.mark.slow
def test_a_file_that_is_no_ledger_is_named_and_stops_nothing(tmp_path):
    (tmp_path / "mine.py").write_text("from tests.support.tiny import get_config")
    (tmp_path / "mine.toml").write_text("steps = 5")
    ended = run("def main():\n    return print(cli.deviations())", f"--config={tmp_path}/mine.py:gpt")
    assert ended.stdout.decode().startswith(f"unknown: {tmp_path}/mine.toml is not a ledger: "), ended.stderr


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("t5_base:large", "t5_base-large"),
        ("examples/dna/config.py:full", "dna-full"),
        ("config.py", "one"),
        ("a.py", "a"),
    ],
)
def test_a_config_has_the_name_of_its_file_or_of_its_folder(given, name, monkeypatch, tmp_path):
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    monkeypatch.setattr(cli._CONFIG_PARSER, "config_argument", given)
    assert cli.config_name() == name
