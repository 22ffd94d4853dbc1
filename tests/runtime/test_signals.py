"""Tests that a signal saves the run and ends it with exit code 75, and that a second signal ends it at once."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.support.runs import FAST, ROOT, command, lines

BUSY = """
import ctypes, signal, sys, time
from pretrainax.runtime.signals import PreemptionHandler
with PreemptionHandler() as stop:
    print("ready", flush=True)
    if sys.argv[1] == "in Python":
        while True:
            time.sleep(0.01)
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex), lock(mutex)  # as a wait for a device that hangs: no handler of Python's ever runs
"""


@pytest.mark.parametrize("where", ["in Python", "in a library"])
def test_a_second_signal_quits_at_once(where):
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BUSY), where], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGTERM)
        assert child.stderr.readline() == b"\n"
        assert child.stderr.readline() == b"SIGTERM: saving after this step; a second signal exits immediately\n"
        child.send_signal(signal.SIGTERM)  # If a launcher dies, each of its threads may send the signal.
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0.6)
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=5) == 128 + signal.SIGINT  # The timeout allows for a busy machine.
    finally:
        child.kill()


def start_busy() -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, "-c", BUSY, "in Python"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout.readline() == b"ready\n"
    return child


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_terminal_that_is_closed_is_never_the_second_signal(first):
    """Tests the SIGHUP of a closed terminal, which may come twice, or after the SIGTERM of the closing process."""
    child = start_busy()
    try:
        child.send_signal(first)
        assert child.stderr.readline() == b"\n"
        assert child.stderr.readline().startswith(first.name.encode())
        child.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0.6)
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=5) == 128 + signal.SIGTERM
    finally:
        child.kill()


def test_a_run_under_nohup_does_not_hear_that_the_terminal_is_closed():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # A child process inherits this.
    try:
        child = start_busy()
    finally:
        signal.signal(signal.SIGHUP, previous)
    try:
        child.send_signal(signal.SIGHUP)
        child.send_signal(signal.SIGTERM)
        assert child.stderr.readline() == b"\n"
        assert child.stderr.readline().startswith(b"SIGTERM")
    finally:
        child.kill()


@pytest.mark.slow
def test_a_signal_saves_and_exits_75_within_10_seconds(tmp_path, text, cache):
    flags = ["--config.train.steps=100000", "--config.checkpoint.every=100000", "--config.evaluate.every=100000"]
    args = command("tests/support/tiny.py:gpt", tmp_path, text, cache, *flags)
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST}
    with subprocess.Popen(args, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=env) as child:
        while not (tmp_path / "metrics.jsonl").exists() or len(lines(tmp_path)) < 5:
            assert child.poll() is None
            time.sleep(0.05)
        before = time.perf_counter()
        child.send_signal(signal.SIGTERM)
        told = child.stderr.read()
        assert child.wait(timeout=60) == 75
    assert time.perf_counter() - before < 10
    saved = int(re.search(r"saved step (\d+); the same command resumes here", told)[1])
    assert (tmp_path / "checkpoints" / str(saved)).is_dir()
