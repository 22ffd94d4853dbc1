"""The interface of trackers: a config names a `Tracker`; its `Writer` writes a run.

One thread opens, uses and closes a writer (`background.py`). An exception of a writer is logged once; the run continues
without the tracker.
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
    """Describes a run to a tracker."""

    workdir: str
    step: int = 0  # steps done before this start
    config: Mapping[str, Value] = dataclasses.field(default_factory=dict)  # by field, {"train.steps": 1000}

    @property
    def name(self) -> str:
        """Returns the name of the run's folder."""
        return os.path.basename(os.path.abspath(self.workdir))


class Writer(abc.ABC):
    """Writes one run to one tracker. Any method may raise; then the run continues without the tracker."""

    link: str = ""  # URL of the run, if only the open tracker knows it

    @abc.abstractmethod
    def metrics(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Writes metrics after `step` steps; split: "train" or "valid"."""

    @abc.abstractmethod
    def text(self, step: int, name: str, text: str) -> None:
        """Writes a Markdown text under a name."""

    @abc.abstractmethod
    def rewind(self, step: int) -> None:
        """Removes or marks the entries after `step`; a rollback repeats these steps."""

    @abc.abstractmethod
    def finish(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of the last validation together with the hyperparameters."""

    @abc.abstractmethod
    def close(self, done: bool) -> None:
        """Flushes and closes; done: the run reached its end."""


@dataclasses.dataclass
class Tracker(kinds.Tracker, abc.ABC):
    """Mirrors the metrics of a run to a tracking service."""

    extra: ClassVar[str] = ""  # extra of setup.cfg with the required packages; "": none
    packages: ClassVar[Sequence[str]] = ()  # import names of these packages

    @abc.abstractmethod
    def open(self, run: TrackedRun) -> Writer:
        """Returns a writer that begins or continues a run."""

    @abc.abstractmethod
    def describe(self, workdir: str) -> str:
        """Returns the location of the run for the header."""

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
    """Returns the set fields of a config by path, with secrets masked."""
    shown: dict[str, Value] = {}
    for field in leaf_fields(experiment):
        if field.value is not None and not field.path.startswith("trackers"):
            value = field.value if isinstance(field.value, Value) else format_value(field.value)
            shown[field.path] = masked_field(field.path, value) if isinstance(value, str) else value
    return shown


def config_table(config: Mapping[str, Value]) -> str:
    """Returns a config as a Markdown table."""
    rows = (f"| {name} | `{str(value).replace('|', chr(92) + '|')}` |" for name, value in config.items())
    return "\n".join(["| field | value |", "| --- | --- |", *rows])


def one_line(error: Exception) -> str:
    """Returns an error as one line of at most 300 characters, with secrets masked."""
    line = masked(" ".join(f"{type(error).__name__}: {error}".split()))
    return line if len(line) <= 300 else f"{line[:300]}…"
