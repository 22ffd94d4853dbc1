"""Trains the runs of a grid (--seeds, --sweep) one after the other in a child process, in separate workdirs.

The child starts with the arguments of the first run and reads the arguments of later runs from stdin, so that runs
share the imports and the compiled programs. A run that fails ends the child, and the next run starts another child; a
crash does not affect other runs. All workdirs are below one folder. The folder contains `run.lock` while the command
runs. The file `runs.json` in this folder has the results and the config of each run. It also has the requested configs
of finished runs, which the command skips. The file keeps the results of earlier commands.
"""

import collections
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Optional, TextIO

from pretrainax.config import UserError, to_json
from pretrainax.config.grid import GridRun
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.runs.grid_results import Comparison, result_of
from pretrainax.runtime.profile_request import ProfileRequest, blocked_signal
from pretrainax.runtime.signals import ENDING, PARENT, PREEMPTED
from pretrainax.runtime.workdir_lock import WorkdirLock

PROGRAM = (sys.executable, "-m", "pretrainax.main")
RECORD = "runs.json"
CHILD = "PRETRAINAX_GRID"  # environment variable of the child process if it may train several runs
_DONE = "\x1e\n"  # line that the child prints after a run, when it waits for the arguments of the next run
# The command prints the lines of a run's output that contain one of these strings.
_NEWS = ("WARNING", " · validation ", "resumed at step", "saved step", "pretrainax: ")


def train_grid(
    runs: Sequence[GridRun],
    workdir: str,
    words: Sequence[str],
    extend: bool,
    request: Optional[ProfileRequest] = None,
    verbose: bool = True,
    share_process: bool = True,
) -> int:
    """Trains all unfinished runs, prints the table of results, and returns the command's exit code.

    Exit codes:
      0: all runs are done.
      1: some runs have failed and all others are done; the same command tries the failed runs again.
      2: a run has an invalid config or input; no other run starts, because the other runs may have the same error.
      75: a signal ended the command; the same command continues the grid.
      above 128: a second signal ended the command immediately.

    Args:
      words: command-line arguments of `python -m pretrainax.main`, without the grid flags and --workdir.
      extend: whether existing runs may continue past their planned end.
      request: forwards SIGUSR1, which requests a profile, to the current or next run. If None, it is not forwarded.
      verbose: True prints all output of each run. False prints validations, warnings and errors, and writes all output
        to WORKDIR/NAME.log.
      share_process: whether runs that succeed leave their process to the next run.
    """
    if os.path.exists(os.path.join(workdir, "config.json")):
        raise UserError(
            f"--workdir={workdir} holds a single run; --seeds and --sweep put each run into a folder below the "
            "workdir: set another --workdir"
        )
    with WorkdirLock(workdir), _Children(request or ProfileRequest(), share_process) as children:
        record = _Record(runs, workdir)
        for number, run in enumerate(runs, 1):
            directory, run_label = os.path.join(workdir, run.name), f"run {number} of {len(runs)}, {run.name}"
            if record.is_done(run):
                _print_line(f"{run_label}: done")
                continue
            if children.num_signals:
                return PREEMPTED
            _print_line(f"{run_label}: {' '.join(run.flags) or 'the config without changes'}")
            exists = os.path.exists(os.path.join(directory, "config.json"))
            extension = ["--extend" if exists else "--noextend"] if extend else []
            log = None if verbose else f"{directory}.log"
            code = children.run([*words, *run.flags, *extension, f"--workdir={directory}"], log)
            if code in (PREEMPTED, UserError.exit_code) or code > 128:
                return code
            record.note(run, code)
        record.write()
        print(f"\n{record.comparison().table(workdir)}\nwritten to {record.path}", file=sys.stderr)
        return int(any(record.codes.values()))


class _Record:
    """Holds the runs' configs and exit codes, and writes the results to runs.json."""

    def __init__(self, runs: Sequence[GridRun], workdir: str):
        self.runs, self.workdir, self.path = runs, workdir, os.path.join(workdir, RECORD)
        self._requested = {run.name: json.loads(json.dumps(to_json(run.experiment))) for run in runs}
        earlier = _read_record(self.path)
        self._done = earlier.get("done", {})  # includes the runs of other grids in this folder
        rows = earlier.get("runs", []) + earlier.get("other_runs", [])
        self._other_runs = [row for row in rows if row["run"] not in self._requested]
        self.codes = {run.name: 0 if self.is_done(run) else None for run in runs}

    def is_done(self, run: GridRun) -> bool:
        """Returns True if runs.json lists a finished run with this name and config, and the run's folder exists."""
        exists = os.path.isdir(os.path.join(self.workdir, run.name))
        return exists and self._done.get(run.name) == self._requested[run.name]

    def note(self, run: GridRun, code: int) -> None:
        """Records the exit code of a run and writes runs.json."""
        self.codes[run.name] = code
        if code == 0:
            self._done[run.name] = self._requested[run.name]
        self.write()

    def comparison(self) -> Comparison:
        """Compares the results so far."""
        folders = {run.name: os.path.join(self.workdir, run.name) for run in self.runs}
        return Comparison([result_of(run, folders[run.name], self.codes[run.name]) for run in self.runs])

    def write(self) -> None:
        """Writes runs.json."""
        content = self.comparison().to_json() | {"other_runs": self._other_runs, "done": self._done}
        write_atomically(self.path, json.dumps(content, indent=1) + "\n")


def _read_record(path: str) -> JsonObject:
    """Reads the runs.json at `path`; returns {} if it is missing or damaged, so that the command checks all runs."""
    if not os.path.exists(path):
        return {}
    try:
        record = read_object(path)
    except UserError as e:
        _print_line(f"{e}: the command checks all finished runs again")
        return {}
    return record if isinstance(record.get("done"), dict) else {}


def next_arguments() -> Optional[list[str]]:
    """Reports the end of a run to the command that started this process, and waits for the arguments of the next run.

    Returns None if there is no further run for this process.
    """
    if CHILD not in os.environ:
        return None
    print(_DONE, end="", flush=True)
    line = sys.stdin.readline()
    return json.loads(line) if line else None


class _Children:
    """Runs `pretrainax.main` in one child process at a time, and forwards the signals that end a run.

    The child has its own process group, so that it receives each signal of a terminal once. On Linux, the child dies
    with this process. On other systems, it finishes its run and holds its workdir's lock until then.
    """

    def __init__(self, request: ProfileRequest, share_process: bool):
        self._request = request
        self._environment = os.environ | {PARENT: str(os.getpid())} | ({CHILD: "1"} if share_process else {})

    def __enter__(self) -> "_Children":
        self.num_signals = 0  # number of received signals
        self._child: Optional[subprocess.Popen] = None
        ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # under nohup
        handled_signals = [s for s in ENDING if not (s == signal.SIGHUP and ignores_hangup)]
        self._previous = {s: signal.signal(s, self._forward_signal) for s in handled_signals}
        return self

    def __exit__(self, *_) -> None:
        if self._child is not None:
            self._child.communicate()  # closes stdin, which ends a waiting child
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self, words: Sequence[str], log: Optional[str] = None) -> int:
        """Runs `pretrainax.main` with the arguments `words` and returns its exit code.

        The exit code is 75 if a signal arrived before the run could handle it, and 1 if the run was killed.

        Args:
          log: file for the output of the run; only lines that contain an item of _NEWS are printed. None: all output
            is printed.
        """
        child = self._start(words)
        if self.num_signals:  # a signal arrived while the child was starting
            child.send_signal(signal.SIGTERM)
        with open(log or os.devnull, "a", encoding="utf-8") as file:
            last_lines = self._copy_output(child, file, prints_all=log is None)
        if last_lines is None:
            return 0
        code, self._child = child.wait(), None
        if code not in (0, PREEMPTED):
            print("".join(last_lines), end="", file=sys.stderr, flush=True)
        if self.num_signals == 1 and not 0 <= code <= 128:
            return PREEMPTED
        if code < 0:
            _print_line(f"the run was killed by {signal.Signals(-code).name}")
            return 128 - code if self.num_signals else 1
        return code

    def _start(self, words: Sequence[str]) -> subprocess.Popen:
        """Starts a run in the waiting child or, if there is none, in a new child; returns the child."""
        if self._child is not None and self._child.poll() is None:
            assert self._child.stdin is not None
            self._child.stdin.write(json.dumps(list(words)) + "\n")
            self._child.stdin.flush()
            self._request.forward_to(self._child)
            return self._child
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        options = {"env": self._environment, "process_group": 0, "text": True, "errors": "replace"}
        with blocked_signal():  # SIGUSR1 would kill a run that has no handler for it yet
            self._child = subprocess.Popen([*PROGRAM, *words], **pipes, **options)
            self._request.forward_to(self._child)
        return self._child

    def _copy_output(self, child: subprocess.Popen, log: TextIO, prints_all: bool) -> Optional[Sequence[str]]:
        """Writes the output of a run to a log, and prints all of it or the lines that contain an item of _NEWS.

        Returns the last lines that were not printed, which may explain a failure; None if the child waits for the next
        run.
        """
        assert child.stdout is not None
        last_lines: collections.deque[str] = collections.deque(maxlen=20)
        for line in child.stdout:
            if line == _DONE:
                return None
            log.write(line)
            log.flush()
            if prints_all or any(part in line for part in _NEWS):
                print(line, end="", file=sys.stderr, flush=True)
            else:
                last_lines.append(line)
        return last_lines

    def _forward_signal(self, number: int, _: Optional[FrameType]) -> None:
        self.num_signals += 1
        if self._child is not None:
            self._child.send_signal(number)


def _print_line(line: str) -> None:
    print(f"pretrainax: {line}", file=sys.stderr, flush=True)
