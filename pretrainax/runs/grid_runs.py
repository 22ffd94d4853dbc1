"""Makes the runs of a grid, one after the other, each in a process of its own and in a workdir below one folder.

A process of its own gives back all memory, compiles as a single run does, and takes no other run down with it. The
folder has `run.lock` while the command is at work there, and `runs.json`: what came out of each run so far, and the
configs of those that are done, by which they are not made again.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Optional

from pretrainax.config import UserError, to_json
from pretrainax.config.grid import GridRun
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.runs.grid_results import Comparison, result_of
from pretrainax.runtime.profile_request import ProfileRequest, held_back
from pretrainax.runtime.signals import ENDING, PARENT, PREEMPTED
from pretrainax.runtime.workdir_lock import WorkdirLock

PROGRAM = (sys.executable, "-m", "pretrainax.main")
RECORD = "runs.json"


def train_grid(
    runs: Sequence[GridRun], workdir: str, words: Sequence[str], extend: bool, request: Optional[ProfileRequest] = None
) -> int:
    """Makes all runs that are not done; prints the table; returns the exit code of the command.

    0: all are done; 1: some have failed, which the same command tries again, and all others are done; 2: a mistake,
    which the others may share, so that none of them is begun; 75: preempted; above 128: by a second signal.

    Args:
      words: those after `python -m pretrainax.main`, without those that ask for a grid and without a workdir.
      extend: runs that are there may go on past their planned end.
      request: what hears SIGUSR1, which the run that is under way gets, or the next one; None: nothing does.
    """
    if os.path.exists(os.path.join(workdir, "config.json")):
        raise UserError(
            f"--workdir={workdir} holds a run, and those of --seeds and --sweep are in folders below one that is none: "
            "take another --workdir"
        )
    with WorkdirLock(workdir), _Children(request or ProfileRequest()) as children:
        record = _Record(runs, workdir)
        for number, run in enumerate(runs, 1):
            directory, where = os.path.join(workdir, run.name), f"run {number} of {len(runs)}, {run.name}"
            if record.is_done(run):
                _say(f"{where}: done")
                continue
            if children.heard:
                return PREEMPTED
            _say(f"{where}: {' '.join(run.flags) or 'as the config says'}")
            more = ["--extend"] if extend and os.path.exists(os.path.join(directory, "config.json")) else []
            code = children.run([*words, *run.flags, *more, f"--workdir={directory}"])
            if code in (PREEMPTED, UserError.exit_code) or code > 128:
                return code
            record.note(run, code)
        record.write()
        print(f"\n{record.comparison().table(workdir)}\nwritten to {record.path}", file=sys.stderr)
        return int(any(record.codes.values()))


class _Record:
    """The file runs.json, and what is known of the runs without it."""

    def __init__(self, runs: Sequence[GridRun], workdir: str):
        self.runs, self.workdir, self.path = runs, workdir, os.path.join(workdir, RECORD)
        self._asked = {run.name: json.loads(json.dumps(to_json(run.experiment))) for run in runs}
        self._done = _configs_done(self.path)  # also of runs of another grid
        self.codes = {run.name: 0 if self.is_done(run) else None for run in runs}

    def is_done(self, run: GridRun) -> bool:
        """Returns True if a run has ended that was asked for as this one is."""
        is_there = os.path.isdir(os.path.join(self.workdir, run.name))
        return is_there and self._done.get(run.name) == self._asked[run.name]

    def note(self, run: GridRun, code: int) -> None:
        """Writes down with which exit code a run has ended."""
        self.codes[run.name] = code
        if code == 0:
            self._done[run.name] = self._asked[run.name]
        self.write()

    def comparison(self) -> Comparison:
        """Returns what came out so far."""
        folders = {run.name: os.path.join(self.workdir, run.name) for run in self.runs}
        return Comparison([result_of(run, folders[run.name], self.codes[run.name]) for run in self.runs])

    def write(self) -> None:
        """Writes the file."""
        write_atomically(self.path, json.dumps(self.comparison().to_json() | {"done": self._done}, indent=1) + "\n")


def _configs_done(path: str) -> JsonObject:
    """Returns the configs of the runs that are done; of a damaged file none: each is then asked itself."""
    if not os.path.exists(path):
        return {}
    try:
        configs = read_object(path).get("done")
    except UserError as e:
        _say(f"{e}: each run that is done is looked at once more")
        return {}
    return configs if isinstance(configs, dict) else {}


class _Children:
    """Runs `pretrainax.main` in one process at a time, and passes on to it the signals that end a run.

    It is in a process group of its own, so that it hears each signal of a terminal once. On Linux it is killed with
    this process; elsewhere it goes on to its end, and holds its workdir until then.
    """

    def __init__(self, request: ProfileRequest):
        self._request = request

    def __enter__(self) -> "_Children":
        self.heard = 0  # signals
        self._child: Optional[subprocess.Popen] = None
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # under nohup
        caught = [s for s in ENDING if not (s == signal.SIGHUP and ignored)]
        self._previous = {s: signal.signal(s, self._pass_on) for s in caught}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self, words: Sequence[str]) -> int:
        """Returns the exit code: 75 also where a first signal came before the run could catch it, 1 where something
        else has killed it."""
        environment = os.environ | {PARENT: str(os.getpid())}
        with held_back():  # it would end a run that does not listen yet
            self._child = subprocess.Popen([*PROGRAM, *words], env=environment, process_group=0)
            self._request.hand_on(self._child)
        if self.heard:  # meanwhile
            self._child.send_signal(signal.SIGTERM)
        code = self._child.wait()
        if self.heard == 1 and not 0 <= code <= 128:
            return PREEMPTED
        if code < 0:
            _say(f"the run was killed by {signal.Signals(-code).name}")
            return 128 - code if self.heard else 1
        return code

    def _pass_on(self, number: int, _: Optional[FrameType]) -> None:
        self.heard += 1
        if self._child is not None:
            self._child.send_signal(number)


def _say(line: str) -> None:
    print(f"pretrainax: {line}", file=sys.stderr, flush=True)
