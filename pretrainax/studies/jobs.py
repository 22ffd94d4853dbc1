"""Lists the jobs of a study (trials, final runs and measurements), and selects the next jobs.

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
RESULTS: dict[Step, str] = {  # names of the result files; users may add measures to a study after its start
    "part": "part.json",  # the first part of a trial, which may stop early
    "train": "result.json",
    "choose": "choices-{measures}.json",  # settings of the measures that all runs of an arm share
    "measure": "measured-{measures}.json",
}
RUN = "run"  # subfolder of a job's folder: the workdir of its run
TRIALS, FINAL = "trials", "final"  # first part of the folders of trials and of final runs


class Job(NamedTuple):
    """A step of a trial or of a final run."""

    folder: str  # below the study's workdir: trials/ARM/FIELD=VALUE,…/seed-1000 or final/ARM/FIELD=VALUE,…/seed-0
    step: Step
    arm: str
    seed: int
    values: dict[str, float]  # {tuned field: value}
    is_tuning: bool
    # The number of updates after which the run stops: a part of a trial, or 0 for an untrained arm. None: all updates.
    stop: Optional[int] = None
    measures: int = 0  # number of the study's measures

    @property
    def result(self) -> str:
        """Returns the path of the result file, below the study's workdir."""
        return os.path.join(self.folder, RESULTS[self.step].format(measures=self.measures))

    @property
    def label(self) -> str:
        """Returns the name of the job in messages."""
        return f"{self.folder} {self.step}"

    @property
    def request(self) -> JsonObject:
        """Returns the request to the worker that performs the job."""
        return {"job": self._asdict()}


def run_flags(plan: Plan, job: Job) -> list[str]:
    """Returns the flags that a job adds to the flags of its arm."""
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
    """The results of finished jobs; each result file in the workdir of a study is read once."""

    def __init__(self, plan: Plan, workdir: str):
        self.plan, self.workdir, self._defaults = plan, workdir, plan.defaults()
        self._read: dict[str, tuple[Job, JsonObject]] = {}  # by path of the result file

    def of(self, job: Job) -> Optional[JsonObject]:
        """Returns the result of a job; None: the job is not finished."""
        if job.result not in self._read:
            path = os.path.join(self.workdir, job.result)
            if not os.path.exists(path):
                return None
            self._read[job.result] = job, read_object(path)
        return self._read[job.result][1]

    def search(self) -> Search:
        """Returns the state of the tuning; without tuning or training, an arm has the values of its config."""
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
        folder = _folder(TRIALS, request.arm, values, request.seed)
        stop = None
        if request.is_part:
            assert self.plan.study.tuning is not None
            stop = max(round(self.plan.lengths[request.arm].steps * self.plan.study.tuning.stop_share), 1)
        return Job(folder, "part" if stop else "train", request.arm, request.seed, values, True, stop)

    def final(self, arm: str, seed: int, step: Step, chosen: Mapping[str, Mapping[str, float]]) -> Job:
        """Returns a job of a final run; `chosen` has the values of each arm, as `Search.chosen`.

        The name of the folder contains the values. A new arm can extend the search, so that the best value of an old
        arm changes. The final runs of the old arm are then trained again.
        """
        stop, values = 0 if self.plan.arm(arm).untrained else None, dict(chosen[arm])
        folder = _folder(FINAL, arm, values, seed)
        return Job(folder, step, arm, seed, values, False, stop, len(self.plan.study.measures))

    def next_jobs(self, seeds: range) -> list[Job]:
        """Returns the jobs that can run now, seed by seed with arms interleaved; []: the runs are finished.

        Args:
          seeds: seeds of the final runs.
        """
        state = self.search()
        if state.pending:
            return [self.trial(request) for request in state.pending]
        jobs, arms = [], [arm.name for arm in self.plan.study.arms]
        choosers = {arm: self.chooser(arm, state.chosen) for arm in arms}
        for seed, arm in itertools.product(seeds, arms):
            train, measure = (self.final(arm, seed, step, state.chosen) for step in ("train", "measure"))
            if (trained := self.of(train)) is None:
                jobs.append(train)
            elif not trained["failed"] and (chooser := choosers[arm]) is not None:
                if (choice := self.of(chooser)) is None:
                    jobs += [chooser] * (seed == chooser.seed)
                elif not choice["failed"] and self.of(measure) is None:
                    jobs.append(measure)
        return jobs

    def chooser(self, arm: str, chosen: Mapping[str, Mapping[str, float]]) -> Optional[Job]:
        """Returns the job that chooses the settings of an arm's measures; None: all final runs failed.

        The job uses the run of the first seed, or of the next seed if this run failed. Arguments as in `final`.
        """
        final = self.plan.study.final
        for seed in range(final.seed, final.seed + final.seeds):
            trained = self.of(self.final(arm, seed, "train", chosen))
            if trained is None or not trained["failed"]:
                return self.final(arm, seed, "choose", chosen)
        return None

    def choices(self, job: Job) -> JsonObject:
        """Returns the choices of an arm's job "choose", {measure: choice}; {} if there are none."""
        chooser = self.chooser(job.arm, {job.arm: job.values})
        return ((chooser and self.of(chooser)) or {}).get("choices", {})

    def finished(self) -> Iterator[Finished]:
        """Yields the jobs whose results were read."""
        for job, result in self._read.values():
            yield Finished(job.arm, job.step, job.is_tuning, result.get("seconds", 0.0))


def _folder(kind: str, arm: str, values: Mapping[str, float], seed: int) -> str:
    """Returns the folder of a run, below the study's workdir."""
    name = ",".join(f"{field}={value!r}" for field, value in values.items()) or "default"
    return os.path.join(kind, arm, name, f"seed-{seed}")
