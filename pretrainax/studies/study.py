"""Defines the contents of a study file: the question, the arms, the budget, the tuning, the seeds and the measures."""

import abc
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, NamedTuple, Optional

from pretrainax.config import Experiment
from pretrainax.config.choice import Choice
from pretrainax.files.json_files import JsonObject
from pretrainax.studies.outcomes import MeasureContext, Outcome


@dataclasses.dataclass
class Arm:
    """One of the alternatives that a study compares."""

    name: str
    # value of --config; a study file may give the arms a config and flags at its top level (`studies/study_file.py`)
    config: str = ""
    flags: tuple[str, ...] = ()  # further flags, for example "--config.train.global_batch_size=16"
    # True: the runs keep their initial parameters, from `checkpoint.init_from` if it is set. An untrained arm has no
    # budget and no trials; fine-tuning measures compare it with the pretrained arms
    untrained: bool = False


AMOUNTS = ("flops", "tokens", "bytes", "seconds", "dollars")  # fields of `Budget`, of which exactly one is set


@dataclasses.dataclass
class Budget:
    """The budget of each run; exactly one of `AMOUNTS` is set. It determines the steps of each arm."""

    flops: Optional[float] = None  # training FLOPs, as counted by `training.work.Work`
    tokens: Optional[float] = None
    bytes: Optional[float] = None  # UTF-8 bytes of text
    seconds: Optional[float] = None  # seconds of updates on `machine`
    dollars: Optional[float] = None  # price of the updates on `machine`
    machine: Optional[str] = None  # topology, for example h100:8; None: this machine
    # most epochs of a run; up to 4 are nearly as good as new text (Muennighoff et al. 2023, arXiv 2305.16264, recalled)
    max_epochs: float = 4.0
    tokenizer: Literal["shared", "own"] = "shared"  # shared: all arms must have the same tokenizer


@dataclasses.dataclass
class Tuning:
    """The search of each arm's hyperparameters, before its final runs."""

    # field -> values as multiples of the arm's default; an arm without the field ignores it
    grid: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    measure: str = "loss"  # name of the measure that selects the values
    seed: int = 1000  # first seed; the seeds of tuning and of final runs must differ
    seeds: int = 1
    stop_share: float = 0.0  # share of the budget after which a trial may stop early; 0: never
    widen: bool = True  # whether a grid whose best value is at its edge gets one more value


@dataclasses.dataclass
class Final:
    """The seeds of the runs that are compared."""

    seed: int = 0  # first pretraining seed
    seeds: int = 5
    # what a pretraining seed changes: initial parameters, data order, dropout, masks
    vary: tuple[Literal["init", "order", "dropout", "mask"], ...] = ("init", "order", "dropout", "mask")
    downstream_seeds: int = 1  # fine-tuning runs of each pretraining run


class Timed(NamedTuple):
    """The estimated seconds of a measure after all programs are compiled."""

    choose: float  # time of `Measure.choose`, once for an arm
    outcomes: float  # time of `Measure.outcomes`, for each final run
    trial: float  # time of `Measure.outcomes` in a trial that the measure scores


@dataclasses.dataclass
class Measure(Choice):
    """Base class of measures of a pretrained run; subclasses are in `studies/measures.py`.

    `problems(experiment)` yields one line for each reason why a run with this config cannot have the measure. The other
    methods save what they compute below `folder/measures/` and read it in a repeated call, which returns equal values.
    """

    name: str

    chooses: ClassVar[bool] = False  # True if `choose` must run before `outcomes`
    is_time: ClassVar[bool] = False  # True if the value depends on the machine and its load

    @property
    def larger_is_better(self) -> bool:
        raise NotImplementedError

    @property
    def unit(self) -> str:
        """Returns the unit of the values, for example "bits per byte"."""
        raise NotImplementedError

    def timed(self, folder: str, experiment: Experiment, context: MeasureContext) -> Timed:
        """Times the measure; the first call also compiles its programs. Arguments as in `outcomes`."""
        started = time.perf_counter()
        self.outcomes(folder, experiment, context)
        elapsed = time.perf_counter() - started
        return Timed(0.0, elapsed, elapsed)

    def differences(self, experiments: Mapping[str, Experiment]) -> Iterator[str]:
        """Yields one line for each reason why the values of the arms {name: config} are not comparable."""
        yield from ()

    def choose(self, folder: str, experiment: Experiment, context: MeasureContext) -> JsonObject:
        """Chooses the settings that all runs of an arm share (a learning rate), for `MeasureContext.choice`.

        Args:
          folder: a finished run of the arm; a study passes the run of the first final seed.
          experiment: the config of this run.
        """
        return {}

    @abc.abstractmethod
    def outcomes(self, folder: str, experiment: Experiment, context: MeasureContext) -> list[Outcome]:
        """Computes the measure of a finished run, for each downstream seed.

        Args:
          folder: the run.
          experiment: the config of the run.
        """
        raise NotImplementedError

    def baselines(self, folder: str, experiment: Experiment, context: MeasureContext) -> dict[str, Outcome]:
        """Computes the measure of trivial models, {"majority class": …}, on the records of `outcomes`."""
        return {}


@dataclasses.dataclass
class Contrast:
    """A comparison of two arms by a measure; positive means that `one` is better than `other`."""

    measure: str
    one: str
    other: str


@dataclasses.dataclass
class Stop:
    """The rule that ends the study."""

    rule: Literal["fixed", "group_sequential"] = "fixed"
    looks: int = 1  # number of interim analyses, including the last


@dataclasses.dataclass
class Study:
    """A study file."""

    question: str
    arms: tuple[Arm, ...]
    budget: Budget
    measures: tuple[Measure, ...]
    primary: Contrast
    tuning: Optional[Tuning] = None
    final: Final = dataclasses.field(default_factory=Final)
    margin: Optional[float] = None  # differences below it count as equal, in the unit of the primary measure
    spread: Optional[float] = None  # assumed standard deviation over seeds of a paired difference; None: from a pilot
    declared: tuple[Contrast, ...] = ()  # further contrasts that Holm's method corrects together with the primary one
    stop: Stop = dataclasses.field(default_factory=Stop)

    def measure(self, name: str) -> Measure:
        """Returns the measure with a name; the study must have it."""
        return next(measure for measure in self.measures if measure.name == name)

    @property
    def trained(self) -> tuple[Arm, ...]:
        """Returns the arms that have a budget and trials."""
        return tuple(arm for arm in self.arms if not arm.untrained)

    @property
    def untested_times(self) -> frozenset[str]:
        """Returns the names of the measures of time that the verdicts do not use; `studies/times.py` reports them."""
        tested = {contrast.measure for contrast in (self.primary, *self.declared)}
        return frozenset(measure.name for measure in self.measures if measure.is_time and measure.name not in tested)
