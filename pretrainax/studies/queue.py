"""Runs the jobs of a study or of a ladder in a worker process, until all are finished.

Several processes, also on machines that share the workdir, can run the same jobs: each job's folder is locked while a
worker performs the job. A job whose worker crashes twice counts as failed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Optional, Protocol

from pretrainax.config import RunFailed, UserError, to_json
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.reporting.streams import print_progress
from pretrainax.reporting.units import clock, elapsed
from pretrainax.runtime.signals import ENDING, PARENT, PREEMPTED
from pretrainax.runtime.workdir_lock import WorkdirLock
from pretrainax.studies.arms import VALIDATIONS
from pretrainax.studies.study import Arm, Study

_PROGRAM = (sys.executable, "-c", "from pretrainax.studies import worker; worker.main()")
_ATTEMPTS = 2  # crashes after which a job counts as failed
_POLL_SECONDS = 1.0  # time between two checks for results of other processes
_LOG, _CRASHES = "log.txt", "crashes.json"
# The result of a job that crashed, without the reason.
FAILED = {"steps": 0, "flops": 0.0, "fingerprint": "", "command": "", "seconds": 0.0, "cost": None}


class QueuedJob(Protocol):
    """A job: `studies.jobs.Job` or `studies.ladder.jobs.LadderJob`."""

    @property
    def folder(self) -> str:
        """Returns the folder of the job, below the workdir."""
        ...

    @property
    def label(self) -> str:
        """Returns the name of the job in messages."""
        ...

    @property
    def result(self) -> str:
        """Returns the path of the result file, below the workdir; the job is finished when the file exists."""
        ...

    @property
    def request(self) -> JsonObject:
        """Returns the request to the worker that performs the job and writes its result file."""
        ...


class WorkerEnded(Exception):
    """The worker process ended without a reply."""


class Interrupted(BaseException):  # like KeyboardInterrupt, so that handlers of Exception do not catch it
    """A signal arrived outside of a job."""


class Worker:
    """Starts a worker process on demand, and forwards the signals that end a study to it.

    If a signal arrives while no worker process exists, for example while data is prepared, it raises Interrupted.

    Args:
      workdir: the study's workdir.
    """

    def __init__(self, workdir: str):
        self._workdir, self.num_signals = workdir, 0  # number of received signals
        self._process: Optional[subprocess.Popen] = None

    def __enter__(self) -> "Worker":
        ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # under nohup
        handled = [s for s in ENDING if not (s == signal.SIGHUP and ignores_hangup)]
        self._previous = {s: signal.signal(s, self._forward) for s in handled}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()  # ends the worker
            self._process.wait()

    def ask(self, request: JsonObject) -> JsonObject:
        """Sends a request and waits for its reply (see `worker`).

        Raises:
          UserError: the worker replied with an error.
          RunFailed: the worker replied that the run failed.
          WorkerEnded: the process ended without a reply.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = self._started()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise WorkerEnded(f"the worker ended with {name}; its output is in {request['log']}")
        reply = json.loads(line)
        if "error" in reply:
            kind = RunFailed if reply["exit_code"] == RunFailed.exit_code else UserError
            raise kind(reply["error"])
        return reply

    def _started(self) -> subprocess.Popen:
        return subprocess.Popen(
            [*_PROGRAM, self._workdir],
            env=os.environ | {PARENT: str(os.getpid())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # so that it receives each signal of a terminal once
        )

    def _forward(self, number: int, _: Optional[FrameType]) -> None:
        self.num_signals += 1
        if self._process is None:
            raise Interrupted
        self._process.send_signal(number)


def measure_speeds(study: Study, workdir: str, worker: Worker, validations: int = VALIDATIONS) -> dict[str, JsonObject]:
    """Measures the speed of each arm on this machine (see `perform.measure_speed`), and stores it in the workdir.

    An arm and its untrained start need the same time for the measures, so this function times the measures once.

    Args:
      validations: number of validations of a run.

    Raises:
      RunFailed: a timed run failed.
      Interrupted: a signal arrived.
    """
    path = os.path.join(workdir, "speeds.json")
    stored, speeds = read_object(path) if os.path.exists(path) else {}, {}
    for arm in study.arms:
        if worker.num_signals:
            raise Interrupted
        key = json.dumps(to_json([arm, study.measures, study.tuning and study.tuning.measure]), sort_keys=True)
        if (speed := stored.get(arm.name, {})).get("of") != key:
            print_progress(f"timing short runs of the arm {arm.name}")
            log = os.path.join(workdir, "speeds", f"{arm.name}.txt")
            try:
                twin = next((speeds[x.name] for x in study.arms if x.name in speeds and _is_start(arm, x)), None)
                request = {"speed": arm.name, "study": to_json(study), "twin": twin, "validations": validations}
                reply = worker.ask(request | {"log": log})
            except (UserError, WorkerEnded) as e:
                if worker.num_signals:
                    raise Interrupted from e
                raise RunFailed(f"the timed run of the arm {arm.name} failed: {e}") from e
            speed = reply["speed"] | {"of": key}
        speeds[arm.name] = speed
        write_atomically(path, json.dumps(stored | speeds, indent=1) + "\n")
    return speeds


def _is_start(arm: Arm, other: Arm) -> bool:
    """Returns True if an arm is the untrained start of another."""
    return arm.untrained and not other.untrained and (arm.config, arm.flags) == (other.config, other.flags)


def run_jobs(
    next_jobs: Callable[[], Sequence[QueuedJob]],
    workdir: str,
    worker: Worker,
    remaining: Callable[[], float] = lambda: 0.0,
) -> int:
    """Runs jobs until there are none; returns 0, or 75 after a signal.

    Args:
      next_jobs: returns the jobs that can run now; []: all are finished.
      remaining: estimates the seconds of the unfinished jobs, which are printed after each job; 0: unknown.

    Raises:
      UserError: a run has an invalid config or input.
    """
    while jobs := next_jobs():
        if worker.num_signals:
            return PREEMPTED
        for job in jobs:
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(WorkdirLock(os.path.join(workdir, job.folder)))
                except RunFailed:  # another process performs this job
                    continue
                result = os.path.join(workdir, job.result)
                if not os.path.exists(result):
                    started = time.perf_counter()
                    if code := _run(job, workdir, worker):
                        return code
                    if os.path.exists(result):
                        left = f" (about {clock(seconds)} of jobs left)" if (seconds := remaining()) else ""
                        print_progress(f"{job.label}: {elapsed(time.perf_counter() - started)}{left}")
            break
        else:
            time.sleep(_POLL_SECONDS)
    return 0


def _run(job: QueuedJob, workdir: str, worker: Worker) -> int:
    """Performs a job in the worker; returns 0, also after a crash, or 75 after a signal."""
    try:
        return worker.ask(job.request | {"log": os.path.join(workdir, job.folder, _LOG)})["code"]
    except WorkerEnded as e:
        if worker.num_signals:
            return PREEMPTED
        _note_crash(job, workdir, str(e))
        return 0


def _note_crash(job: QueuedJob, workdir: str, reason: str) -> None:
    """Counts a crash of a job; after `_ATTEMPTS` crashes, writes a result file with the reason of the failure."""
    path = os.path.join(workdir, job.folder, _CRASHES)
    count = 1 + (read_object(path)["count"] if os.path.exists(path) else 0)
    print_progress(f"{job.label}: {reason}")
    write_atomically(path, json.dumps({"count": count}) + "\n")
    if count >= _ATTEMPTS:
        write_atomically(os.path.join(workdir, job.result), json.dumps(FAILED | {"failed": reason}, indent=1) + "\n")
