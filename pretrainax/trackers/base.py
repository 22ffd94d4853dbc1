"""The interface for trackers: a config contains a `Tracker`, which opens a `Writer` for the entries of a run.

A writer is opened, used and closed in a single thread (`background.py`). If a writer raises an exception, the exception
is logged once and the run continues without the tracker.
"""

import abc
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from pretrainax.config import Experiment, UserError, kinds
from pretrainax.config.choice import format_value
from pretrainax.config.values import leaf_fields
from pretrainax.files.extras import missing, needs
from pretrainax.trackers.secrets import masked, masked_field

Value = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """The workdir, first step and config of a run, which a tracker receives when it is opened."""

    workdir: str
    step: int = 0  # number of steps that earlier processes have completed
    config: Mapping[str, Value] = dataclasses.field(default_factory=dict)  # by field path, {"train.steps": 1000}

    @property
    def name(self) -> str:
        """Returns the name of the run, the last component of its workdir."""
        return os.path.basename(os.path.abspath(self.workdir))


class Writer(abc.ABC):
    """Writes the entries of one run to one tracking service.

    Any method may raise an exception, in which case the run continues without the tracker.
    """

    link: str = ""  # URL of the run in the tracking service, if known only after opening; "": no URL

    @abc.abstractmethod
    def write_metrics(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Writes the metrics of `step`, computed on the split "train" or "valid"."""

    @abc.abstractmethod
    def write_text(self, step: int, name: str, text: str) -> None:
        """Writes a Markdown text as the entry `name` of `step`."""

    @abc.abstractmethod
    def rewind(self, step: int) -> None:
        """Removes or marks the entries after `step`, because the run rolls back to it and repeats the later steps."""

    @abc.abstractmethod
    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of the last validation, at `step`, as the run's final results."""

    @abc.abstractmethod
    def close(self, done: bool) -> None:
        """Writes all pending entries and closes the tracker; `done` says whether the run has completed."""


@dataclasses.dataclass
class Tracker(kinds.Tracker, abc.ABC):
    """Copies the metrics of a run to a tracking service."""

    extra: ClassVar[str] = ""  # pip extra (in setup.cfg) with the required packages; "": no extra
    packages: ClassVar[Sequence[str]] = ()  # import names of the required packages

    @abc.abstractmethod
    def open(self, run: TrackedRun) -> Writer:
        """Opens a writer, which begins a new run in the tracking service or continues that of an earlier process."""

    @abc.abstractmethod
    def describe(self, workdir: str) -> str:
        """Describes in one line where the tracked run can be found, for the header of the log."""

    def problems(self, experiment: Experiment) -> Iterator[str]:
        """Yields an error message for each invalid setting of this tracker."""
        if [type(tracker) for tracker in experiment.trackers].count(type(self)) > 1:
            yield f"config.trackers has {type(self).__name__} more than once: leave one of them out"


def check_trackers(trackers: Sequence[Tracker]) -> None:
    """Raises UserError if a package that a tracker needs is not installed."""
    for tracker in trackers:
        if absent := missing(tracker.packages):
            use = f"config.trackers has {type(tracker).__name__}, which"
            raise UserError(f"{needs(use, absent, tracker.extra)}, or leave it out")


def config_values(experiment: Experiment) -> dict[str, Value]:
    """Returns the values of a config's fields by path, with secrets masked; omits None values and the trackers."""
    values: dict[str, Value] = {}
    for field in leaf_fields(experiment):
        if field.value is not None and not field.path.startswith("trackers"):
            value = field.value if isinstance(field.value, Value) else format_value(field.value)
            values[field.path] = masked_field(field.path, value) if isinstance(value, str) else value
    return values


def config_table(config: Mapping[str, Value]) -> str:
    """Formats the result of `config_values` as a Markdown table with one row per field."""
    rows = (f"| {name} | `{str(value).replace('|', chr(92) + '|')}` |" for name, value in config.items())
    return "\n".join(["| field | value |", "| --- | --- |", *rows])


def describe_error(error: Exception) -> str:
    """Formats an error's type and message as one line, truncated to 300 characters and with secrets masked."""
    line = masked(" ".join(f"{type(error).__name__}: {error}".split()))
    return line if len(line) <= 300 else f"{line[:300]}…"
