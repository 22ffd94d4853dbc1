"""Defines the results that the parts of a study exchange."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np

from pretrainax.config import Experiment
from pretrainax.files.json_files import JsonObject


class Outcome(NamedTuple):
    """One value of a measure, and the influence of each test record on it."""

    value: float
    # [records]: value minus the value without the record's cluster, as `scoring.results.leave_one_out` returns. Records
    # have the same order for all arms and seeds. None: the measure has no records (throughput).
    changes: Optional[np.ndarray] = None


Outcomes = Mapping[int, Sequence[Outcome]]  # {pretraining seed: outcome of each downstream seed}


class MeasureContext(NamedTuple):
    """The settings of a study that its measures use."""

    downstream_seeds: Sequence[int] = (0,)
    # True for a trial of the tuning. The measure then uses records that have no influence on the final values.
    is_tuning: bool = False
    choice: JsonObject = {}  # the result of `Measure.choose` for the arm; {}: each run has its own choice
    # Trains a run in a folder and returns the exit code, as `runs.train.train`. None: `runs.train.train`.
    train: Optional[Callable[[Experiment, str], int]] = None


class Trial(NamedTuple):
    """A tuning run of an arm."""

    arm: str
    values: Mapping[str, float]  # {field: value}
    seed: int
    value: Optional[float]  # value of the tuning measure; None: the trial failed or diverged
    flops: float  # training FLOPs that the trial used
    stopped_early: bool = False


class FinalRun(NamedTuple):
    """A run that the study compares."""

    arm: str
    seed: int
    folder: str  # below the study's workdir
    fingerprint: str  # SHA-256 of the run's config
    command: str  # reproduces the run
    steps: int
    flops: float
    lines: Sequence[JsonObject]  # lines of metrics.jsonl


class Findings(NamedTuple):
    """Everything that the report of a study shows, in an order that does not depend on the order of the runs."""

    trials: Sequence[Trial]
    chosen: Mapping[str, Mapping[str, float]]  # {arm: {field: value}}
    unfinished: Mapping[str, str]  # {arm: why its tuning is not finished}
    runs: Sequence[FinalRun]
    outcomes: Mapping[str, Mapping[str, Outcomes]]  # {measure: {arm: outcomes}}
    baselines: Mapping[str, Mapping[str, Outcome]]  # {measure: {"majority class": outcome}}
    changes: Sequence[str]  # what changed after the start of the study
    choices: Mapping[str, Mapping[str, JsonObject]] = {}  # {measure: {arm: result of `Measure.choose`}}
