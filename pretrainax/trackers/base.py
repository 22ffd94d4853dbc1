"""The interface of trackers: a config contains a `Tracker`, whose `Writer` writes the entries of a run.

A writer is opened, used and closed in one thread (`background.py`). If a writer raises an exception, it is logged once,
and the run continues without the tracker.
"""

import abc
import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from pretrainax.config import Experiment, UserError, kinds
from pretrainax.config.choice import format_value
from pretrainax.config.values import leaf_fields
from pretrainax.trackers.secrets import masked, masked_field

Value = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """The facts about a run that a tracker gets when it opens."""

    workdir: str
    step: int = 0  # number of steps that were done before this process started
    config: Mapping[str, Value] = dataclasses.field(default_factory=dict)  # by path of the field, {"train.steps": 1000}

    @property
    def name(self) -> str:
        """Returns the name of the run, which is the last component of its workdir."""
        return os.path.basename(os.path.abspath(self.workdir))


class Writer(abc.ABC):
    """Writes the entries of one run to one tracker.

    Any method may raise an exception. The run then continues without the tracker.
    """

    link: str = ""  # URL of the run in the tracker, if it is known only after opening; "": none

    @abc.abstractmethod
    def write_metrics(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Writes the metrics of `step`; split: "train" or "valid"."""

    @abc.abstractmethod
    def write_text(self, step: int, name: str, text: str) -> None:
        """Writes a Markdown text as an entry of `step` with a name."""

    @abc.abstractmethod
    def rewind(self, step: int) -> None:
        """Removes or marks the entries after `step`, because the run returns to this step and repeats later steps."""

    @abc.abstractmethod
    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of the last validation together with the hyperparameters."""

    @abc.abstractmethod
    def close(self, done: bool) -> None:
        """Writes all pending entries and closes the tracker; done: True if the run reached its end."""


@dataclasses.dataclass
class Tracker(kinds.Tracker, abc.ABC):
    """Copies the metrics of a run to a tracking service."""

    extra: ClassVar[str] = ""  # pip extra (in setup.cfg) with the required packages; "": none
    packages: ClassVar[Sequence[str]] = ()  # import names of these packages

    @abc.abstractmethod
    def open(self, run: TrackedRun) -> Writer:
        """Returns a writer that begins a new run in the tracker, or continues the run of an earlier process."""

    @abc.abstractmethod
    def describe(self, workdir: str) -> str:
        """Returns a text with the location of the tracked run, for the header."""

    def problems(self, experiment: Experiment) -> Iterator[str]:
        if [type(tracker) for tracker in experiment.trackers].count(type(self)) > 1:
            yield f"config.trackers has {type(self).__name__} more than once: leave one of them out"


def check_trackers(trackers: Sequence[Tracker]) -> None:
    """Raises UserError if a package that a tracker needs is not installed."""
    for tracker in trackers:
        if missing := [name for name in tracker.packages if importlib.util.find_spec(name) is None]:
            raise UserError(
                f"config.trackers has {type(tracker).__name__}, which needs {' and '.join(missing)}: pip install "
                f"'pretrainax[{tracker.extra}]', or leave it out"
            )


def config_values(experiment: Experiment) -> dict[str, Value]:
    """Returns the fields of a config whose value is not None, by path, with secrets masked."""
    shown: dict[str, Value] = {}
    for field in leaf_fields(experiment):
        if field.value is not None and not field.path.startswith("trackers"):
            value = field.value if isinstance(field.value, Value) else format_value(field.value)
            shown[field.path] = masked_field(field.path, value) if isinstance(value, str) else value
    return shown


def config_table(config: Mapping[str, Value]) -> str:
    """Returns a Markdown table of a config from `config_values`, with a row per field."""
    rows = (f"| {name} | `{str(value).replace('|', chr(92) + '|')}` |" for name, value in config.items())
    return "\n".join(["| field | value |", "| --- | --- |", *rows])


def describe_error(error: Exception) -> str:
    """Returns the type and message of an error as one line of at most 300 characters, with secrets masked."""
    line = masked(" ".join(f"{type(error).__name__}: {error}".split()))
    return line if len(line) <= 300 else f"{line[:300]}…"
