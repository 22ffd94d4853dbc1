"""Tests that a workdir has one run at a time, and that the lock ends with its process, here and on other machines."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from pretrainax.config import RunFailed, UserError
from pretrainax.runtime import workdir_lock
from pretrainax.runtime.workdir_lock import WorkdirLock
from tests.support.runs import ROOT

HOLDING = """
    import sys, time
    from pretrainax.runtime import workdir_lock
    workdir_lock.BEAT = 0.05
    with workdir_lock.WorkdirLock(sys.argv[1]):
        print("held", flush=True)
        time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the lock of `tmp_path`."""
    command = [sys.executable, "-c", textwrap.dedent(HOLDING), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.fixture
def machines(monkeypatch):
    """Simulates machines that share files but no locks; `machines("a")` moves the following calls to machine a."""

    def no_locks(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(workdir_lock, "BEAT", 0.02)
    monkeypatch.setattr(workdir_lock, "SILENCE", 0.5)
    return lambda name: monkeypatch.setattr(workdir_lock, "_machine", lambda: name)


def die(lock: WorkdirLock) -> None:
    """Leaves the state of a process that was killed on a machine whose locks other machines cannot see."""
    lock._stop_event.set()
    lock._thread.join()
    os.close(lock._descriptor)


def test_the_second_of_two_is_refused_and_told_who_holds_it(holder, tmp_path):
    with pytest.raises(RunFailed, match=rf"in use by process {holder.pid} of .+ on .+, since .+: wait for its end"):
        WorkdirLock(str(tmp_path)).__enter__()
    assert holder.poll() is None


def test_a_holder_that_was_killed_on_this_machine_is_followed_at_once(holder, tmp_path, capsys):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with WorkdirLock(str(tmp_path)):
        assert capsys.readouterr().err == ""  # The lock did not wait.


def test_nothing_is_left_of_a_lock_that_was_given_back(tmp_path):
    with WorkdirLock(str(tmp_path / "run")):
        assert os.listdir(tmp_path / "run") == ["run.lock"]
    assert not (tmp_path / "run").exists()  # The lock created this folder, and nothing used it.
    with WorkdirLock(str(tmp_path)):
        (tmp_path / "config.json").touch()
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_holder_on_another_machine_that_lives_keeps_it(machines, tmp_path):
    machines("a")
    with WorkdirLock(str(tmp_path)):
        machines("b")
        with pytest.raises(RunFailed, match=f"in use by process {os.getpid()} of"):
            WorkdirLock(str(tmp_path)).__enter__()


def test_a_holder_on_another_machine_that_is_silent_is_followed_after_a_while_and_that_is_said(
    machines, tmp_path, capsys, monkeypatch
):
    machines("a")
    # The clock of this machine is far ahead.
    monkeypatch.setattr(workdir_lock.time, "strftime", lambda form: "2999-01-01 00:00:00")
    die(WorkdirLock(str(tmp_path)).__enter__())
    machines("b")
    with WorkdirLock(str(tmp_path)):
        said = capsys.readouterr().err
    assert re.search(r"is held by process \d+ of .*, since 2999-01-01.*: waiting 0 s for a heartbeat", said)
    assert "no heartbeat" in said


def test_a_holder_on_another_machine_that_gives_it_back_is_followed_at_once(machines, tmp_path, monkeypatch):
    machines("a")
    first = WorkdirLock(str(tmp_path)).__enter__()
    machines("b")
    monkeypatch.setattr(workdir_lock, "SILENCE", 60.0)
    monkeypatch.setattr(workdir_lock.time, "sleep", lambda seconds: first.__exit__())
    with WorkdirLock(str(tmp_path)):
        assert json.loads((tmp_path / "run.lock").read_text())["machine"] == "b"


def test_who_was_taken_for_dead_ends_itself(holder, tmp_path):
    other = {"machine": "another", "host": "host17", "process": 7, "user": "anna", "since": "today", "beat": 1}
    (tmp_path / "run.lock").write_text(json.dumps(other).ljust(1024))
    assert holder.wait(timeout=20) == 1
    assert "was taken over by process 7 of anna on host17, since today: this run stops" in holder.stderr.read()
    assert json.loads((tmp_path / "run.lock").read_text()) == other


def test_a_lock_whose_file_is_removed_while_it_is_taken_is_taken_anew(tmp_path, monkeypatch):
    flock, calls = fcntl.flock, []

    def late(descriptor, how):
        calls.append(descriptor)
        if len(calls) == 1:  # The previous holder releases the lock after this process has opened the file.
            os.remove(tmp_path / "run.lock")
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with WorkdirLock(str(tmp_path)), pytest.raises(RunFailed, match="in use"):
        WorkdirLock(str(tmp_path)).__enter__()
    assert len(calls) == 3


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 1024, b"[1]"])
def test_a_file_that_says_nothing_is_nobodys(content, tmp_path):
    (tmp_path / "run.lock").write_bytes(content)
    with WorkdirLock(str(tmp_path)):
        assert json.loads((tmp_path / "run.lock").read_text())["process"] == os.getpid()


@pytest.mark.parametrize("path", ["file", "file/below", "x" * 300])
def test_a_workdir_that_cannot_be_a_folder_is_one_line(path, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--workdir=.* cannot be created: .*; set another folder"):
        WorkdirLock(str(tmp_path / path)).__enter__()
