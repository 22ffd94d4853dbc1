"""What all commands share: an error is one line and the process ends, whatever its threads do; --workdir."""

import subprocess
import sys
import textwrap

import pytest

from tests.support.runs import ROOT


def run(program: str, *arguments) -> subprocess.CompletedProcess:
    """A command whose main is the body given."""
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
