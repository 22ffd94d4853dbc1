"""The face that all trackers have: a `Tracker` is what a config names, its `Writer` what writes to it.

A writer is opened, used and closed by one thread (`lanes.py`). Whatever it raises is said once, and the run goes on
without it.
"""

import abc
import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from pretrainax.config import Experiment, UserError, kinds
from pretrainax.config.choice import written
from pretrainax.config.values import stated
from pretrainax.trackers.secrets import masked, masked_field

Value = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """Holds what a tracker is told of a run when it is opened."""

    workdir: str
    step: int = 0  # steps done before this start
    config: Mapping[str, Value] = dataclasses.field(default_factory=dict)  # by field, {"train.steps": 1000}

    @property
    def name(self) -> str:
        """Returns the name of the run's folder."""
        return os.path.basename(os.path.abspath(self.workdir))


class Writer(abc.ABC):
    """Writes one run to one tracker. Any method may raise: the tracker is left out then."""

    link: str = ""  # where people find the run, if that is known only now

    @abc.abstractmethod
    def figures(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Adds the figures after `step` steps; split: "train" or "valid"."""

    @abc.abstractmethod
    def text(self, step: int, name: str, text: str) -> None:
        """Adds a text, in Markdown, under a name."""

    @abc.abstractmethod
    def rewind(self, step: int) -> None:
        """Takes back, or marks, what was written of the steps after `step`: a rollback runs them anew."""

    @abc.abstractmethod
    def finish(self, step: int, figures: Mapping[str, float]) -> None:
        """Adds the figures of the last validation, beside the hyperparameters."""

    @abc.abstractmethod
    def close(self, done: bool) -> None:
        """Writes what is left; done: the run came to its end, and did not fail or leave to be resumed."""


@dataclasses.dataclass
class Tracker(kinds.Tracker, abc.ABC):
    """A place that a run is shown in, beside its metrics.jsonl."""

    extra: ClassVar[str] = ""  # of setup.cfg, that has its packages; "": none is needed
    packages: ClassVar[Sequence[str]] = ()  # which that extra brings along

    @abc.abstractmethod
    def open(self, run: TrackedRun) -> Writer:
        """Returns what writes a run: anew, or on in what an earlier start of it has begun."""

    @abc.abstractmethod
    def describe(self, workdir: str) -> str:
        """Returns for people where the run is shown."""

    def problems(self, experiment: Experiment) -> Iterator[str]:
        if [type(tracker) for tracker in experiment.trackers].count(type(self)) > 1:
            yield f"config.trackers has {type(self).__name__} more than once: leave one of them out"


def check_trackers(trackers: Sequence[Tracker]) -> None:
    """Raises UserError where a package that a tracker needs is not installed."""
    for tracker in trackers:
        if missing := [name for name in tracker.packages if importlib.util.find_spec(name) is None]:
            raise UserError(
                f"config.trackers has {type(tracker).__name__}, which needs {' and '.join(missing)}: pip install "
                f"'pretrainax[{tracker.extra}]', or leave it out"
            )


def shown_config(experiment: Experiment) -> dict[str, Value]:
    """Returns the fields of a config that have a value, by their paths; what may be secret is masked."""
    shown: dict[str, Value] = {}
    for field in stated(experiment):
        if field.value is not None and not field.path.startswith("trackers"):
            value = field.value if isinstance(field.value, Value) else written(field.value)
            shown[field.path] = masked_field(field.path, value) if isinstance(value, str) else value
    return shown


def as_markdown(config: Mapping[str, Value]) -> str:
    """Returns a config as a table."""
    rows = (f"| {name} | `{str(value).replace('|', chr(92) + '|')}` |" for name, value in config.items())
    return "\n".join(["| field | value |", "| --- | --- |", *rows])


def one_line(error: Exception) -> str:
    """Returns what went wrong, without secrets, for a line."""
    said = masked(" ".join(f"{type(error).__name__}: {error}".split()))
    return said if len(said) <= 300 else f"{said[:300]}…"
