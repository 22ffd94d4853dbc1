"""Lists the jobs of a study: its trials, final runs and measurements, and which of them are next.

A job has a folder below the study's workdir, and is finished when its result file exists there. The next jobs follow
from the result files alone. A killed study therefore continues, processes can share a workdir, and a deleted folder is
computed again.
"""

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, Optional

from pretrainax.config import Experiment
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.studies.arms import configured, length_flags, seed_flags, untrained_flags, value_flags
from pretrainax.studies.plan import Plan
from pretrainax.studies.tuning import Request, Search, search

Step = Literal["part", "train", "choose", "measure"]
RESULTS: dict[Step, str] = {  # names of the result files
    "part": "part.json",  # the first part of a trial, which may stop early
    "train": "result.json",
    "choose": "choices.json",  # settings of the measures that all runs of an arm share
    "measure": "measured.json",
}
RUN = "run"  # subfolder of a job's folder: the workdir of its run
TRIALS = "trials"  # first part of the folders of trials


class Job(NamedTuple):
    """A step of a trial or of a final run."""

    folder: str  # below the study's workdir: trials/ARM/FIELD=VALUE,…/seed-1000 or final/ARM/seed-0
    step: Step
    arm: str
    seed: int
    values: dict[str, float]  # {tuned field: value}
    is_tuning: bool
    # number of updates after which the run stops: a part of a trial, or 0 for an untrained arm; None: all updates
    stop: Optional[int] = None

    @property
    def result(self) -> str:
        """Returns the path of the result file, below the study's workdir."""
        return os.path.join(self.folder, RESULTS[self.step])

    @property
    def label(self) -> str:
        """Returns the name of the job in messages."""
        return f"{self.folder} {self.step}"

    @property
    def request(self) -> JsonObject:
        """Returns the request to the worker that performs the job."""
        return {"job": self._asdict()}


def run_flags(plan: Plan, job: Job) -> list[str]:
    """Returns the flags of a job's run, in addition to those of its arm."""
    arm = plan.arm(job.arm)
    experiment = configured(arm)
    flags = untrained_flags() if arm.untrained else length_flags(experiment, plan.lengths[job.arm].steps)
    return [*flags, *value_flags(job.values), *seed_flags(experiment, plan.study.final, job.seed)]


def experiment_of(plan: Plan, job: Job) -> Experiment:
    """Returns the config of a job's run."""
    return configured(plan.arm(job.arm), run_flags(plan, job))


class Finished(NamedTuple):
    """The time of a finished job."""

    arm: str
    step: Step
    is_tuning: bool
    seconds: float


class Results:
    """The results of finished jobs, read from the workdir of a study once each."""

    def __init__(self, plan: Plan, workdir: str):
        self.plan, self.workdir, self._defaults = plan, workdir, plan.defaults()
        self._read: dict[str, JsonObject] = {}

    def of(self, job: Job) -> Optional[JsonObject]:
        """Returns the result of a job; None: the job is not finished."""
        if job.result not in self._read:
            path = os.path.join(self.workdir, job.result)
            if not os.path.exists(path):
                return None
            self._read[job.result] = read_object(path)
        return self._read[job.result]

    def search(self) -> Search:
        """Returns the state of the tuning; without tuning or training, an arm keeps its own values."""
        tuning, own = self.plan.study.tuning, {arm.name: {} for arm in self.plan.study.arms}
        if tuning is None:
            return Search([], {}, own, {})
        costs: dict[Request, Optional[float]] = {}
        while True:  # each pass finds the costs of the trials that the previous pass requested
            state = search(tuning, self._defaults, costs)
            found = {r: result["cost"] for r in state.pending if (result := self.of(self.trial(r))) is not None}
            if not found:
                return state._replace(chosen=own | state.chosen)
            costs |= found

    def trial(self, request: Request) -> Job:
        """Returns the job of a trial."""
        values = dict(request.setting)
        name = ",".join(f"{field}={value!r}" for field, value in values.items()) or "default"
        folder = os.path.join(TRIALS, request.arm, name, f"seed-{request.seed}")
        stop = None
        if request.is_part:
            assert self.plan.study.tuning is not None
            stop = max(round(self.plan.lengths[request.arm].steps * self.plan.study.tuning.stop_share), 1)
        return Job(folder, "part" if stop else "train", request.arm, request.seed, values, True, stop)

    def final(self, arm: str, seed: int, step: Step, chosen: Mapping[str, Mapping[str, float]]) -> Job:
        """Returns a job of a final run; `chosen` has the values of each arm, as `Search.chosen`."""
        stop = 0 if self.plan.arm(arm).untrained else None
        return Job(os.path.join("final", arm, f"seed-{seed}"), step, arm, seed, dict(chosen[arm]), False, stop)

    def next_jobs(self, seeds: range) -> list[Job]:
        """Returns the jobs that can run now, seed by seed with arms interleaved; []: the runs are finished.

        seeds: seeds of the final runs. The measures' common settings of an arm are chosen on the run of the first seed.
        """
        state = self.search()
        if state.pending:
            return [self.trial(request) for request in state.pending]
        jobs, waiting = [], set[str]()  # arms whose settings are not chosen
        for seed, arm in itertools.product(seeds, (arm.name for arm in self.plan.study.arms)):
            train, choose, measure = (
                self.final(arm, seed, step, state.chosen) for step in ("train", "choose", "measure")
            )
            if (trained := self.of(train)) is None:
                jobs.append(train)
                waiting |= {arm} if seed == seeds.start else set()
            elif trained["failed"]:
                continue
            elif seed == seeds.start and self.of(choose) is None:
                jobs.append(choose)
                waiting.add(arm)
            elif arm not in waiting and self.of(measure) is None:
                jobs.append(measure)
        return jobs

    def choices(self, job: Job) -> JsonObject:
        """Returns the choices of an arm's job "choose", {measure: choice}; {} if there are none."""
        first = self.final(job.arm, self.plan.study.final.seed, "choose", {job.arm: job.values})
        return (self.of(first) or {}).get("choices", {})

    def finished(self) -> Iterator[Finished]:
        """Yields the jobs whose results were read."""
        steps: dict[str, Step] = {name: step for step, name in RESULTS.items()}
        for path, result in self._read.items():
            kind, arm, *_, name = path.split(os.sep)
            yield Finished(arm, steps[name], kind == TRIALS, result.get("seconds", 0.0))
