"""Tests workdirs with unusual names, with foreign files or damaged records in them, and with two runs at once.

    python -m tests.chaos.workdirs [--config=tests/support/tiny.py:gpt] [--only=names,two_runs,records,checkpoints]

In a workdir of any name, a run trains, is killed, resumes, exports, and starts another run. If two runs use the same
workdir, one ends with a one-line error and the other ends normally. After a kill, a new start continues at once on the
same machine. On another machine, whose clock may be years off, it waits first. A run with damaged records
(metrics.jsonl, goodput.json) resumes.
"""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from tests.checkpoints.test_steps import NAMES, STRANGERS
from tests.support import runs


class Workdirs:
    def __init__(self, whole: runs.Whole, folder: pathlib.Path, report: runs.Report):
        self.whole, self.folder, self.report = whole, folder, report
        self.rng = random.Random(0)

    def scratch(self) -> pathlib.Path:
        path = self.folder / "trial"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path

    # --- names -------------------------------------------------------------------------------------------------------

    def names(self) -> None:
        for name in NAMES:
            with self.report.trying(f"a workdir called {name!r}"):
                self.any_name(self.scratch(), name)

    def any_name(self, folder: pathlib.Path, name: str) -> None:
        workdir = folder / name
        end_after(self.whole.training(workdir), workdir, 4, signal.SIGTERM)
        self.whole.ends_the_same(workdir)
        run_well(runs.exporting(workdir, folder / "export"))
        assert runs.files(folder / "export") == runs.files(self.whole.export)
        run_well(importing(folder / "export", folder / "again" / name))
        run_well(runs.exporting(folder / "again" / name, folder / "second"))
        # the content is the same except for dtypes
        assert (folder / "second" / "model.safetensors").stat().st_size
        assert sorted(os.listdir(folder)) == sorted([name, "again", "export", "second"])
        assert os.listdir(folder / "again") == [name]

    # --- two runs ----------------------------------------------------------------------------------------------------

    def two_runs(self) -> None:
        trials = {
            **{f"a second start {when}": self.second_start(when) for when in ("at once", "that trains", "at a save")},
            "two starts at the same time": self.two_starts,
            "an import into the workdir of a live run": self.import_into,
            "a start right after SIGKILL": self.after_a_kill,
            "a start on another machine after SIGKILL": self.on_another_machine,
            "a start on another machine during a live run": self.beside_another_machine,
        }
        for what, trial in trials.items():
            with self.report.trying(what):
                trial(self.scratch() / "run")

    def second_start(self, when: str) -> Callable[[pathlib.Path], None]:
        seen = {"at once": "run.lock", "that trains": "metrics.jsonl", "at a save": "checkpoints/4"}[when]

        def trial(workdir: pathlib.Path) -> None:
            first = runs.start(self.whole.training(workdir))
            wait_for(workdir / seen, first)
            is_refused(runs.run(self.whole.training(workdir)), first.pid)
            assert first.wait() == 0
            runs.assert_same_run(workdir, self.whole.run)

        return trial

    def two_starts(self, workdir: pathlib.Path) -> None:
        command = self.whole.training(workdir)
        processes = [subprocess.Popen(command, cwd=runs.ROOT, env=runs.ENV, stderr=subprocess.PIPE) for _ in range(4)]
        said = [process.communicate()[1].decode() for process in processes]
        codes = [process.returncode for process in processes]
        assert sorted(codes) == [0, 1, 1, 1], said
        assert all("is in use by process" in text for text, code in zip(said, codes, strict=True) if code), said
        runs.assert_same_run(workdir, self.whole.run)

    def import_into(self, workdir: pathlib.Path) -> None:
        first = runs.start(self.whole.training(workdir))
        wait_for(workdir / "run.lock", first)
        is_refused(runs.run(importing(self.whole.export, workdir)), first.pid)
        assert first.wait() == 0
        runs.assert_same_run(workdir, self.whole.run)

    def after_a_kill(self, workdir: pathlib.Path) -> None:
        end_after(self.whole.training(workdir), workdir, 4, signal.SIGKILL)
        assert (workdir / "run.lock").exists()
        done = run_well(self.whole.training(workdir))
        assert "heartbeat" not in done.stderr
        runs.assert_same_run(workdir, self.whole.run)

    def on_another_machine(self, workdir: pathlib.Path) -> None:
        end_after(self.whole.training(workdir), workdir, 4, signal.SIGKILL)
        from_another_machine(workdir / "run.lock")
        done = run_well(self.whole.training(workdir))
        assert "held by process 7 of anna on host17" in done.stderr and "no heartbeat" in done.stderr, done.stderr
        runs.assert_same_run(workdir, self.whole.run)

    def beside_another_machine(self, workdir: pathlib.Path) -> None:
        workdir.mkdir()
        second = subprocess.Popen(
            self.whole.training(workdir), cwd=runs.ROOT, env=runs.ENV, stderr=subprocess.PIPE, text=True
        )
        from_another_machine(workdir / "run.lock")
        while second.poll() is None:
            time.sleep(1)
            from_another_machine(workdir / "run.lock")
        assert second.returncode == 1 and "in use by process 7 of anna on host17" in second.stderr.read()

    # --- workdir contents --------------------------------------------------------------------------------------------

    def interrupted(self) -> pathlib.Path:
        """Returns a copy of the workdir of a run that was killed between two saves."""
        kept = self.folder / "interrupted"
        if not kept.exists():
            end_after(self.whole.training(kept), kept, 7, signal.SIGKILL)
        return shutil.copytree(kept, self.scratch() / "run")

    def records(self, times: int = 3) -> None:
        for name in ("metrics.jsonl", "goodput.json"):
            for what in DAMAGES:
                for _ in range(times if "random" in what else 1):
                    with self.report.trying(f"{name}: {what}"):
                        self.damaged_records([name], what)

    def damaged_records(self, names: list[str], what: str) -> None:
        workdir = self.interrupted()
        for name in names:
            path = workdir / name
            path.write_bytes(DAMAGES[what](path.read_bytes(), self.rng))
        run_well(self.whole.training(workdir))
        assert all(type(line["step"]) is int and "loss" in line for line in runs.lines(workdir))
        expected, got = runs.arrays(self.whole.run), runs.arrays(workdir)
        assert all((got[path] == expected[path]).all() for path in expected)

    def checkpoints(self) -> None:
        for what, put in STRANGERS.items():
            with self.report.trying(f"a checkpoint with {what}"):
                workdir = self.interrupted()
                newest = runs.steps(workdir)[-1]
                put(workdir / "checkpoints" / str(newest))
                done = run_well(self.whole.training(workdir))
                assert f"resumed at step {newest}" in done.stderr, done.stderr
        with self.report.trying("a checkpoint renamed to another step"):
            workdir = self.interrupted()
            *_, before, newest = runs.steps(workdir)
            os.rename(workdir / "checkpoints" / str(newest), workdir / "checkpoints" / "38")
            done = run_well(self.whole.training(workdir))
            assert f"it was saved as step {newest}" in done.stderr and f"resumed at step {before}" in done.stderr


def _line(content: bytes, rng: random.Random, put: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    lines[rng.randrange(len(lines))] = put
    return b"".join(lines)


def _flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a random bit flipped": _flip,
    "cut at a random place": lambda content, rng: content[: rng.randrange(len(content))],
    "zeros at a random place": lambda content, rng: (
        content[: (at := rng.randrange(len(content)))] + bytes(9) + content[at:]
    ),
    "a line of zeros": lambda content, rng: _line(content, rng, bytes(50) + b"\n"),
    "a line that is not UTF-8": lambda content, rng: _line(content, rng, b'{"step": \xff}\n'),
    "a line of another program": lambda content, rng: _line(content, rng, b'{"epoch": 3}\n'),
    "a line twice": lambda content, rng: content + content.splitlines(keepends=True)[0],
    "nothing": lambda content, rng: b"",
    "another file": lambda content, rng: b"\x89PNG\r\n\x1a\n",
    "a deep nest": lambda content, rng: b"[" * 100_000,
}


def importing(directory, workdir) -> list[str]:
    module = [sys.executable, "-m", "pretrainax.huggingface"]
    return [*module, "import", f"--from={directory}", f"--workdir={workdir}", "--noverify"]


def run_well(args: list[str]) -> subprocess.CompletedProcess:
    done = runs.run(args)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def is_refused(process: subprocess.CompletedProcess, holder: int) -> None:
    assert process.returncode == 1 and f"is in use by process {holder} of" in runs.last_line(process), process.stderr


def wait_for(path: pathlib.Path, process: subprocess.Popen) -> None:
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.005)


def end_after(args: list[str], workdir: pathlib.Path, step: int, number: signal.Signals) -> None:
    """Sends a signal to the command after it logs the step."""
    process, metrics = runs.start(args), workdir / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        time.sleep(0.005)
    process.send_signal(number)
    assert process.wait() == (75 if number == signal.SIGTERM else -number)


def from_another_machine(lock: pathlib.Path) -> None:
    """Writes the record of a run on another machine, whose clock is years ahead."""
    own = {
        "machine": "another",
        "host": "host17",
        "process": 7,
        "user": "anna",
        "since": "2999-01-01",
        "beat": time.time(),
    }
    lock.write_bytes(json.dumps(own).encode().ljust(1024))


TRIALS = ("names", "two_runs", "records", "checkpoints")


def main() -> int:
    report = runs.Report()
    with runs.trials(__doc__, TRIALS) as (names, whole, folder):
        workdirs = Workdirs(whole, folder, report)
        for name in names:
            getattr(workdirs, name)()
    return report.sum_up()


if __name__ == "__main__":
    sys.exit(main())
