"""Performs the runs of a ladder: copies a trunk's checkpoint to each branch, trains, and writes result files.

A run is finished when its result file exists. These files alone determine the next runs. A killed ladder therefore
continues, and processes can share a workdir.
"""

import json
import os
import shlex
import shutil
import time
from collections.abc import Iterable
from typing import NamedTuple, Optional

from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.runtime.signals import PREEMPTED
from pretrainax.studies.arms import configured
from pretrainax.studies.jobs import RUN
from pretrainax.studies.ladder.rungs import Rung
from pretrainax.studies.perform import Train, attempt
from pretrainax.studies.study import Arm

RESULT = "result.json"


class LadderJob(NamedTuple):
    """A run of a ladder as a job of the queue."""

    folder: str
    config: str
    flags: tuple[str, ...]
    start: Optional[tuple[str, int]] = None  # as in `Rung.start`

    @property
    def label(self) -> str:
        """Returns the name of the job in messages."""
        return self.folder

    @property
    def result(self) -> str:
        """Returns the path of the result file, below the ladder's workdir."""
        return os.path.join(self.folder, RESULT)

    @property
    def request(self) -> JsonObject:
        """Returns the request to the worker that performs the job."""
        return {"rung": self._asdict()}

    @property
    def arm(self) -> Arm:
        """Returns the config of the run."""
        return Arm("", self.config, tuple(self.flags))  # a request has a list of flags


def job_of(rung: Rung) -> LadderJob:
    """Returns the job that trains a run."""
    return LadderJob(rung.folder, rung.arm.config, rung.arm.flags, rung.start)


def result_of(folder: str, workdir: str) -> Optional[JsonObject]:
    """Returns the content of a run's result file; None: the run is not finished."""
    path = os.path.join(workdir, folder, RESULT)
    return read_object(path) if os.path.exists(path) else None


def next_jobs(rungs: Iterable[Rung], workdir: str) -> list[LadderJob]:
    """Returns the jobs that can run now: trunks, and branches of finished trunks; []: all runs are finished.

    Branches of a trunk that failed count as finished.
    """
    jobs = []
    for rung in rungs:
        trunk = result_of(rung.start[0], workdir) if rung.start else {"failed": ""}
        if trunk is not None and not trunk["failed"] and result_of(rung.folder, workdir) is None:
            jobs.append(job_of(rung))
    return jobs


def perform_rung(job: LadderJob, workdir: str, train_run: Train) -> int:
    """Trains a run and writes its result file; returns 0, or 75 if a signal paused the training.

    If a run diverges or fails with an exit code, its result file has the reason.

    Args:
      train_run: trains a run in a folder and returns the exit code.

    Raises:
      UserError: the config or an input is invalid.
      RunFailed: a cause outside the run, for example a full disk, ended it; a repeated call resumes it.
    """
    run, started = os.path.join(workdir, job.folder, RUN), time.perf_counter()
    if job.start is not None:
        trunk, step = job.start
        leave_trunk(os.path.join(workdir, trunk, RUN), step, run)
    reason = attempt(configured(job.arm), run, job.folder, train_run)
    if reason is None:
        return PREEMPTED
    result = {
        "failed": reason,
        "command": shlex.join(["pretrainax", "train", f"--config={job.config}", *job.flags]),
        "seconds": time.perf_counter() - started,
    }
    write_atomically(os.path.join(workdir, job.result), json.dumps(result, indent=1) + "\n")
    return 0


def leave_trunk(trunk: str, step: int, branch: str) -> None:
    """Prepares the folder of a branch: a copy of the trunk's checkpoint at a step, from which the branch resumes.

    The checkpoint has the optimizer state and the position in the data. The learning rates of trunk and branch are
    equal up to this step, so the branch equals a run of its length that started at step 0. Does nothing if the folder
    exists.
    """
    if os.path.exists(branch):
        return
    copied = f"{branch}.copying"  # renamed to `branch` when the copy is complete
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(os.path.join(trunk, "checkpoints", str(step)), os.path.join(copied, "checkpoints", str(step)))
    shutil.copytree(os.path.join(trunk, "tokenizer"), os.path.join(copied, "tokenizer"))
    shutil.copy(os.path.join(trunk, "metrics.jsonl"), copied)
    os.rename(copied, branch)
