"""Tests lost terminals and missing resources: a run must continue, save and exit, or end with a one-line error.

    python -m tests.chaos.terminal [--config=tests/support/tiny.py:gpt]

Terminals: no reader of the output, stdout or stderr closed from the start, a real terminal that hangs up (with and
without nohup), and a launcher of two processes that is killed or hung up. Resources: too few files or threads (thread
starts fail after a random number), no shared memory, and a workdir that is a file or has an invalid name.
"""

import fcntl
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys
import termios
import time

from tests.chaos.workdirs import wait_for
from tests.support import runs

# Runs a command that can start at most the given number of threads.
FEW_THREADS = """
import itertools, runpy, sys, threading

real, count, most = threading._start_new_thread, itertools.count(), int(sys.argv[1])


def start(*args):
    if next(count) >= most:
        raise RuntimeError("can't start new thread")
    return real(*args)


threading._start_new_thread = start
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


LONG = "--config.train.steps=5000"  # too long to finish: a launcher that exits slowly cannot lead to status 0


class Terminal:
    def __init__(self, whole: runs.Whole, folder: pathlib.Path):
        self.whole, self.folder = whole, folder

    def in_shell(self, name: str, form: str) -> None:
        """Checks that the run ends normally; `form` calls the command as RUN."""
        script = f"RUN() {{ {shlex.join(self.whole.training(self.folder / name))}; }}\n{form}"
        done = runs.run(["bash", "-c", script])
        assert done.returncode == 0, done.stderr
        runs.assert_same_run(self.folder / name, self.whole.run)

    def nobody_reads(self) -> None:
        self.in_shell("head", "RUN 2>&1 | head -1; exit ${PIPESTATUS[0]}")

    def stderr_is_closed(self) -> None:
        self.in_shell("no_stderr", "RUN 2>&-")

    def all_is_closed(self) -> None:
        self.in_shell("nothing", "RUN <&- >&- 2>&-")

    def on_a_terminal(self, name: str, *before: str) -> int:
        """Closes the terminal of a run during training; returns its exit status."""
        runs.hear_hangups()
        ours, theirs = os.openpty()
        process = subprocess.Popen(
            [*before, *self.whole.training(self.folder / name)],
            cwd=runs.ROOT,
            env=runs.ENV,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        wait_for(self.folder / name / "metrics.jsonl", process)
        os.close(ours)
        return process.wait(timeout=200)

    def the_terminal_hangs_up(self) -> None:
        code = self.on_a_terminal("hung_up")
        assert code == 75, f"exit code {code}"
        assert runs.valid_steps(self.folder / "hung_up") == runs.steps(self.folder / "hung_up") != []
        self.whole.ends_the_same(self.folder / "hung_up")

    def the_terminal_hangs_up_under_nohup(self) -> None:
        assert self.on_a_terminal("nohup", "nohup") == 0
        runs.assert_same_run(self.folder / "nohup", self.whole.run)

    def launcher_ends_by(self, number: signal.Signals) -> None:
        workdir = self.folder / f"launched_{number.name}"
        command = [sys.executable, "launch/local.py", "--processes=2", "--devices=1", "--"]
        launcher = runs.start([*command, *self.whole.training(workdir, LONG)[3:]])
        wait_for(workdir / "metrics.jsonl", launcher)
        children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        launcher.send_signal(number)
        code = launcher.wait()
        assert code == (-number if number == signal.SIGKILL else 75), f"exit code {code}"
        deadline = time.monotonic() + 100
        while any(is_alive(child) for child in children):
            assert time.monotonic() < deadline, "a process survived its launcher"
            time.sleep(0.1)
        assert runs.valid_steps(workdir) == runs.steps(workdir) != [], "no valid checkpoint"
        assert not (workdir / "run.lock").exists(), "the process did not exit in order"

    def the_launcher_is_killed(self) -> None:
        self.launcher_ends_by(signal.SIGKILL)

    def the_launcher_is_hung_up(self) -> None:
        self.launcher_ends_by(signal.SIGHUP)

    # --- too little --------------------------------------------------------------------------------------------------

    def is_one_line(self, args: list[str], expected: str, codes: tuple[int, ...] = (1, 2)) -> None:
        failed = runs.run(args)
        assert failed.returncode in codes and expected in runs.last_line(failed), failed.stderr

    def few_files(self) -> None:
        command = shlex.join(self.whole.training(self.folder / "files"))
        self.is_one_line(["bash", "-c", f"ulimit -n 24; {command}"], "raise `ulimit -n`")

    def few_threads(self, times: int = 6) -> None:
        rng = random.Random(0)
        for i in range(times):
            program, _, *rest = self.whole.training(self.folder / f"threads-{i}", "--config.train.steps=6")
            args = [program, "-c", FEW_THREADS, str(most := rng.randint(0, 40)), *rest]
            failed = runs.run(args, timeout=200)
            last = runs.last_line(failed)
            assert failed.returncode == 1 and "thread" in last, f"after {most}: {failed.stderr[-2000:]}"

    def no_shared_memory(self) -> None:
        command = shlex.join(self.whole.training(self.folder / "shared", "--config.data.workers=2"))
        unshare = ["unshare", "--mount", "bash", "-c"]
        mount = "mount -t tmpfs -o ro none /dev/shm"
        if subprocess.run([*unshare, mount], capture_output=True).returncode:
            raise runs.Skipped("this machine does not allow mounts (unshare --mount)")
        self.is_one_line([*unshare, f"{mount} && {command}"], "set config.data.workers=0, or mount /dev/shm", (2,))

    def a_workdir_that_is_a_file(self) -> None:
        (self.folder / "file").touch()
        self.is_one_line(self.whole.training(self.folder / "file"), "cannot be created", (2,))

    def a_workdir_that_is_no_text(self) -> None:
        self.is_one_line(self.whole.training(self.folder / os.fsdecode(b"\xff\xfe")), "not UTF-8", (2,))

    def a_workdir_that_a_library_misreads(self) -> None:
        self.is_one_line(self.whole.training(self.folder / "back\\slash"), "no checkpoint can be saved in", (2,))
        assert not (self.folder / "back\\slash").exists()


def is_alive(process: str) -> bool:
    """Returns True if a process runs; zombies do not count."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


TRIALS = (
    *(
        "nobody_reads",
        "stderr_is_closed",
        "all_is_closed",
        "the_terminal_hangs_up",
        "the_terminal_hangs_up_under_nohup",
    ),
    *("the_launcher_is_killed", "the_launcher_is_hung_up", "few_files", "few_threads", "no_shared_memory"),
    *("a_workdir_that_is_a_file", "a_workdir_that_is_no_text", "a_workdir_that_a_library_misreads"),
)


def main() -> int:
    report = runs.Report()
    with runs.trials(__doc__, TRIALS) as (names, whole, folder):
        terminal = Terminal(whole, folder)
        for name in names:
            with report.trying(name.replace("_", " ")):
                getattr(terminal, name)()
    return report.sum_up()


if __name__ == "__main__":
    sys.exit(main())
