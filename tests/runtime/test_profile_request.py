"""Tests that SIGUSR1 never ends a run, at any time, and requests a profile of the next steps."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from pretrainax.profiling.trace import read_trace
from pretrainax.runtime.profile_request import SIGNAL, ProfileRequest, blocked_signal
from pretrainax.runtime.recorder import FOLDER, files_of
from tests.support.runs import ENV, FAST, ROOT, command, lines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a process hears is read in /proc")
LONG = ["--config.train.steps=100000", "--config.checkpoint.every=100000", "--config.evaluate.every=100000"]


def hears(pid: int) -> bool:
    """Returns True if a process has a handler of the signal (proc(5): SigCgt)."""
    with open(f"/proc/{pid}/status") as f:
        (mask,) = (line.split()[1] for line in f if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (SIGNAL - 1) & 1)


def wait_until(ready, child, seconds: float = 300):
    deadline = time.monotonic() + seconds
    while not ready():
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def started(args, told):
    """Starts a process that writes its stderr to a file; kills it at the end."""
    env = ENV | {"XLA_FLAGS": FAST, "PYTHONPATH": str(ROOT)}
    with open(told, "w") as f, subprocess.Popen(args, cwd=ROOT, stderr=f, env=env) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.slow
def test_a_run_is_asked_before_its_first_step_and_while_it_makes_steps(tmp_path, text, cache):
    workdir, told = tmp_path / "run", tmp_path / "told"
    with started(command("tests/support/tiny.py:gpt", workdir, text, cache, *LONG), told) as child:
        wait_until(lambda: hears(child.pid), child)
        child.send_signal(SIGNAL)  # The run has not read its config yet.
        wait_until(lambda: "profile of steps 2 to 4: " in told.read_text(), child)
        child.send_signal(SIGNAL)
        wait_until(lambda: told.read_text().count("profile of steps ") == 2, child)
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=60) == 75
    traces = [files_of(str(folder), 0).trace for folder in (workdir / FOLDER).iterdir()]
    later, first = sorted((read_trace(trace).steps for trace in traces), reverse=True)
    assert first == [2, 3, 4] and len(later) == 3
    assert told.read_text().count("SIGUSR1: a profile of the next steps follows") == 2
    assert len(lines(workdir, "train")) >= 4


@pytest.mark.slow
def test_a_profile_that_is_left_by_a_preemption_is_written(tmp_path, text, cache):
    workdir, told = tmp_path / "run", tmp_path / "told"
    flags = [*LONG, "--config.train.profile_steps=2:101"]
    with started(command("tests/support/tiny.py:gpt", workdir, text, cache, *flags), told) as child:
        wait_until(lambda: (workdir / "metrics.jsonl").exists() and len(lines(workdir)) >= 1, child)
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=60) == 75
    trace = read_trace(files_of(str(workdir / FOLDER / "step_2"), 0).trace)
    assert trace.steps == [*range(2, trace.steps[-1] + 1)]


LISTENING_LATE = """
import sys, time
time.sleep(0.5)
from pretrainax.runtime.profile_request import ProfileRequest
request = ProfileRequest().listen()
while not request.requested:
    time.sleep(0.01)
sys.exit(7)
"""


def late_child() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", LISTENING_LATE], cwd=ROOT, stderr=subprocess.DEVNULL)


def test_a_child_that_does_not_listen_yet_gets_the_signal_when_it_does():
    with blocked_signal(), late_child() as child:
        child.send_signal(SIGNAL)
        assert child.wait(timeout=60) == 7


def test_a_child_that_is_started_otherwise_would_die_of_it():
    with late_child() as child:
        child.send_signal(SIGNAL)
        assert child.wait(timeout=60) == -SIGNAL


def test_what_is_heard_is_handed_on_from_before_and_after():
    previous = signal.getsignal(SIGNAL)
    try:
        request = ProfileRequest().listen()
        os.kill(os.getpid(), SIGNAL)
        assert request.requested
        with blocked_signal(), late_child() as child:
            request.forward_to(child)
            assert child.wait(timeout=60) == 7 and not request.requested
        with blocked_signal():
            child = late_child()
            request.forward_to(child)
        os.kill(os.getpid(), SIGNAL)
        assert child.wait(timeout=60) == 7 and not request.requested
    finally:
        signal.signal(SIGNAL, previous)


@pytest.mark.parametrize(
    "refusal, asked, said",
    [
        ("", False, "SIGUSR1: a profile of the next steps follows"),
        ("", True, "SIGUSR1: a profile is already requested"),
        (
            "the profile of steps 3 to 5 is being written",
            False,
            "SIGUSR1: the profile of steps 3 to 5 is being written",
        ),
    ],
)
def test_each_signal_is_answered(refusal, asked, said, capfd):
    previous = signal.getsignal(SIGNAL)
    try:
        request = ProfileRequest().listen()
        request.refusal, request.requested = refusal, asked
        os.kill(os.getpid(), SIGNAL)
        assert capfd.readouterr().err == f"\n{said}\n"
        assert request.requested == (not refusal)
    finally:
        signal.signal(SIGNAL, previous)
