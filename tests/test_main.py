"""Runs the real command in a subprocess: three families end to end, kills and resumes, and errors of one line."""

import os
import pathlib
import random
import signal
import sys
import time

import pytest

from tests.support.runs import assert_same_run, command, lines, run, start
from tests.support.tiers import few


@pytest.mark.parametrize("family", few(["t5", "bert", "gpt"], ["bert"]))
def test_a_run_of_each_family_leaves_what_the_design_names(family, tmp_path, text, cache):
    out = run(command(f"tests/support/tiny.py:{family}", tmp_path, text, cache))
    assert out.returncode == 0, out.stderr
    assert {"config.json", "metrics.jsonl", "events", "curves.png", "tokenizer", "checkpoints"} <= set(
        os.listdir(tmp_path)
    )
    train, valid = lines(tmp_path, "train"), lines(tmp_path, "valid")
    assert [line["step"] for line in train] == list(range(1, 41))
    assert [line["step"] for line in valid] == [10, 20, 30, 40]
    assert valid[-1]["loss"] < valid[0]["loss"]
    assert ("unigram baseline" if family != "bert" else "where the input is not [MASK]") in out.stderr


@pytest.fixture(scope="session")
def whole(tmp_path_factory, text, cache) -> pathlib.Path:
    """Trains an undisturbed run."""
    workdir = tmp_path_factory.mktemp("whole")
    out = run(command("tests/support/tiny.py:t5", workdir, text, cache))
    assert out.returncode == 0, out.stderr
    return workdir


def interrupt(args: list[str], workdir, step: int, number: signal.Signals) -> int:
    """Starts the command, sends the signal after the log line of the step, and returns the exit code."""
    process = start(args)
    metrics = workdir / "metrics.jsonl"
    deadline = time.time() + 200
    while time.time() < deadline and process.poll() is None:
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            process.send_signal(number)
            break
        time.sleep(0.002)
    return process.wait(timeout=100)


@pytest.mark.slow
@pytest.mark.parametrize("number", few([signal.SIGKILL, signal.SIGTERM], [signal.SIGKILL]))
def test_an_interrupted_run_ends_bit_identical_to_a_whole_one(number, whole, tmp_path, text, cache):
    args = command("tests/support/tiny.py:t5", tmp_path, text, cache)
    code = interrupt(args, tmp_path, random.SystemRandom().randint(3, 30), number)  # not between the last saves
    assert code == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    out = run(args)
    assert out.returncode == 0, out.stderr
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
def test_a_workdir_of_another_config_is_refused_with_the_fields(whole, text, cache):
    out = run(
        command("tests/support/tiny.py:t5", whole, text, cache, "--config.train.seed=1", "--config.train.log_every=7")
    )
    assert out.returncode == 2
    assert "train.seed: 0 -> 1" in out.stderr and "log_every" not in out.stderr


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--config=configs/quikstart.py"], "did you mean 'configs/quickstart.py'"),
        (["--config=configs/t5_base.py:bse"], "did you mean 'base'"),
        (
            ["--config=tests/support/tiny.py:t5", "--config.train.stpes=3"],
            "config.train has no field 'stpes', did you mean 'steps'",
        ),
        (["--config=tests/support/tiny.py:t5", "--config.train.steps=many"], "--config.train.steps=many"),
        (["--config=tests/support/tiny.py:t5", "--config.data.source.path=/no/such/place"], "/no/such/place"),
        (["--config=tests/support/tiny.py:t5", "--config.model.family=decoder"], "encoder_decoder"),
        (["--config=tests/support/tiny.py:gpt", "--config.data.sequence_length=128"], "128"),
        (["--config=tests/support/tiny.py:gpt", "--config.model.num_heads=5"], "config.model.num_heads"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(flags, message):
    out = run([sys.executable, "-m", "pretrainax.main", "--workdir=/tmp/never", *flags])
    assert out.returncode == 2
    assert message in out.stderr.strip().splitlines()[-1]
    assert "Traceback" not in out.stderr


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_says_what_the_command_does_and_ends_with_0(word):
    out = run([sys.executable, "-m", "pretrainax.main", word])
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("Trains a model: ") and "--workdir" in out.stdout
    assert "With --config=FILE, --help shows every field of that config." in out.stdout


@pytest.mark.slow
def test_help_with_a_config_shows_its_file_and_its_fields_as_they_are_overridden():
    out = run(
        [sys.executable, "-m", "pretrainax.main", "--help", "--config=tests/support/tiny.py:gpt"]
        + ["--config.train.steps=7", "--config.optimizer=Lamb(b2=0.9)"]
    )
    assert out.returncode == 0, out.stderr
    assert "A config of each family, small enough to train in a test" in out.stdout
    assert "--config.train.steps=7\n      int, by default 1000: total number of updates" in out.stdout
    assert '--config.optimizer="Lamb(b2=0.9)"' in out.stdout and "--config.optimizer.b2=0.9\n" in out.stdout


def test_an_interrupted_command_is_one_line():
    code = "from pretrainax import cli\ndef main():\n    raise KeyboardInterrupt\ncli.run(main)"
    out = run([sys.executable, "-c", code])
    assert out.returncode == 130 and out.stderr == "\npretrainax: interrupted\n"


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(tmp_path, text, cache):
    out = run(command("tests/support/tiny.py:gpt", tmp_path, text, cache, "--config.optimizer.learning_rate=1e30"))
    assert out.returncode == 1
    assert "not finite at step" in out.stderr and "examples" in out.stderr
