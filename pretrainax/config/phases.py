"""Divides a run's steps into phases, each of which overrides some fields of the run's config.

`phases_of` returns each phase's config as an `Experiment` without phases. All code that trains, plans or displays a
phase uses this config.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional, Protocol, TypeVar

from pretrainax.config.choice import Choice, format_value
from pretrainax.files.errors import UserError

if TYPE_CHECKING:  # the implementations
    from _typeshed import DataclassInstance

    from pretrainax.config.experiment import Experiment
    from pretrainax.data.objectives import Objective
    from pretrainax.data.sources import Source
else:
    from pretrainax.config.kinds import Objective, Source

T = TypeVar("T", bound="DataclassInstance")
P = TypeVar("P", bound="_WithStop")

_OVERRIDES = {  # field of a phase -> config field that it overrides
    "sequence_length": "data.sequence_length",
    "global_batch_size": "train.global_batch_size",
    "accumulate": "train.accumulate",
    "learning_rate": "optimizer.learning_rate",
    "dropout_rate": "model.dropout_rate",
    "attention_dropout_rate": "model.attention_dropout_rate",
    "theta": "model.position.theta",
    "source": "data.source",
    "weights": "data.source.weights",
    "objective": "objective",
}
# The fields of the SourceMixture in config.data.source that a phase with `weights` sets to these values.
_RESET_WITH_WEIGHTS = {"stages": (), "temperature": 1.0, "limit": None}
_LENGTHS = ("steps", "tokens", "share")


@dataclasses.dataclass
class Phase(Choice):
    """A phase of a run: its length, and the config fields that the phase overrides.

    The length is set by `steps`, `tokens` or `share`. The last phase may omit its length, and then ends at
    `train.steps`. The learning-rate schedule spans the whole run. All phases use the same validation, so their
    metrics are comparable.
    """

    steps: Optional[int] = None  # length in updates
    # length in tokens, including padding; a step has global_batch_size · sequence_length tokens
    tokens: Optional[float] = None
    share: Optional[float] = None  # length as a fraction of train.steps
    # input tokens of an example. For this field and all following fields, None means the value of the run's config
    sequence_length: Optional[int] = None
    global_batch_size: Optional[int] = None  # examples per update
    accumulate: Optional[int] = None  # microbatches per update
    # peak of the schedule; multiplies adam_learning_rate, the second rate of some optimizers, by the same factor
    learning_rate: Optional[float] = None
    dropout_rate: Optional[float] = None  # dropout of the output of each sublayer, not of attention weights
    attention_dropout_rate: Optional[float] = None  # dropout of attention weights
    theta: Optional[float] = None  # base of the rotary positions
    source: Optional[Source] = None  # source of the documents; the tokenizer remains the one for the config's source
    weights: Optional[tuple[float, ...]] = None  # weights of a SourceMixture, which replace its weights and stages
    objective: Optional[Objective] = None  # training objective

    def changes(self) -> str:
        """Formats the fields that the phase overrides: "sequence_length 128, dropout_rate 0.0"; returns "" if none."""
        overrides = {name: getattr(self, name) for name in _OVERRIDES}
        return ", ".join(f"{name} {format_value(value)}" for name, value in overrides.items() if value is not None)


class RunPhase(NamedTuple):
    """A phase of a run, with its range of steps and its complete config."""

    number: int  # number of the phase, from 1
    start: int  # number of updates before the phase
    stop: int  # number of updates at the end of the phase
    experiment: "Experiment"  # config of the phase, without phases; train.steps is the length of the whole run
    changes: str  # fields that the phase overrides, formatted by `Phase.changes`

    @property
    def steps(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        return f"phase {self.number}"

    @property
    def what(self) -> str:
        """Formats the steps of the phase and its overrides: "steps 1 to 100: sequence_length 128"."""
        return f"steps {self.start + 1:,} to {self.stop:,}: {self.changes or 'as the config says'}"

    def __str__(self) -> str:
        return f"{self.name}, {self.what}"


def phases_of(experiment: "Experiment") -> tuple[RunPhase, ...]:
    """Builds the phases of a run, in order; a run without config.phases has one phase with the run's config.

    Raises:
      UserError: the phases do not add up to the steps of the run.
    """
    if not experiment.phases:
        return (RunPhase(1, 0, experiment.train.steps, experiment, ""),)
    plain = [_phase_config(experiment, i) for i in range(len(experiment.phases))]
    phases, start = [], 0
    for i, length in enumerate(_lengths(experiment, plain)):
        phases.append(RunPhase(i + 1, start, start + length, plain[i], experiment.phases[i].changes()))
        start += length
    return tuple(phases)


class _WithStop(Protocol):
    """Protocol of objects that describe a phase and have its `stop`, for example `RunPhase`."""

    @property
    def stop(self) -> int: ...


def phase_at(phases: Sequence[P], step: int) -> P:
    """Returns the phase of the next update after `step` completed updates, or the last phase if the run is complete."""
    return next((phase for phase in phases if step < phase.stop), phases[-1])


@contextlib.contextmanager
def phase_in_errors(phase: RunPhase) -> Iterator[None]:
    """Adds the phase to the message of any UserError in this context, if the phase overrides config fields."""
    try:
        yield
    except UserError as e:
        if phase.experiment.phases or not phase.changes:  # the run itself, or a phase without changes
            raise
        raise type(e)(f"phase {phase.number} of config.phases ({phase.changes}): {e}") from e


def config_at_checkpoint(experiment: "Experiment", steps: Sequence[int]) -> "Experiment":
    """Returns the phase-free config of the phase that produced the newest of several checkpoints.

    Args:
      experiment: config of the run.
      steps: numbers of updates after which the checkpoints were saved.

    Raises:
      UserError: the checkpoints come from phases with different position encodings, so they cannot be averaged.
    """
    if not experiment.phases:
        return experiment
    phases = phases_of(experiment)
    checkpoint_phases = [phase_at(phases, max(step - 1, 0)) for step in sorted(steps)]
    positions = {str(phase.experiment.model.position) for phase in checkpoint_phases}
    if len(positions) > 1:
        raise UserError(
            f"the checkpoints {', '.join(map(str, sorted(steps)))} are from phases with different positions "
            f"({' and '.join(sorted(positions))}) and cannot be averaged: use checkpoints of one phase"
        )
    return checkpoint_phases[-1].experiment


def problems_of_phases(experiment: "Experiment") -> Iterator[str]:
    """Yields an error message for each invalid phase, and a message if the phases do not add up to train.steps."""
    problems = list(_field_problems(experiment))
    yield from problems
    if not problems and experiment.phases:
        try:
            phases_of(experiment)
        except UserError as e:
            yield str(e)


def _field_problems(experiment: "Experiment") -> Iterator[str]:
    """Yields an error message for each invalid field of a phase."""
    for i, phase in enumerate(experiment.phases):
        path, lengths = f"config.phases[{i}]", [name for name in _LENGTHS if getattr(phase, name) is not None]
        if len(lengths) > 1:
            yield f"{path} has {' and '.join(lengths)}: set only one of them"
        if not lengths and i + 1 < len(experiment.phases):
            yield f"{path} has no length: set steps, tokens or share; only the last phase may omit them"
        if phase.share is not None and not 0 < phase.share < 1:
            yield f"{path}.share is {phase.share}, it must be between 0 and 1"
        for name in ("steps", "tokens"):
            if (value := getattr(phase, name)) is not None and value < 1:
                yield f"{path}.{name} is {value}, it must be at least 1"
        for name, target in _OVERRIDES.items():
            section_path, _, field = target.rpartition(".")
            section = _get(experiment, section_path) if name != "weights" or phase.source is None else phase.source
            if getattr(phase, name) is not None and not hasattr(section, field):
                yield f"{path}.{name} sets config.{target}, which {type(section).__name__} does not have: remove it"


def _lengths(run: "Experiment", plain: Sequence["Experiment"]) -> list[int]:
    """Computes the number of steps of each phase.

    A phase with a `share` gets a rounded number of steps, at least one. If all phases have shares that add up to 1, the
    last phase gets the remainder of train.steps.

    Args:
      run: config of the run.
      plain: config of each phase, without phases.

    Raises:
      UserError: the phases do not add up to train.steps.
    """
    total, lengths = run.train.steps, []
    shares = [phase.share for phase in run.phases if phase.share is not None]
    fills_run = len(shares) == len(run.phases) and math.isclose(sum(shares), 1)
    for phase, experiment in zip(run.phases, plain, strict=True):
        remaining_steps, remaining_phases = total - sum(lengths), len(run.phases) - len(lengths) - 1
        if phase.steps is not None:
            lengths.append(phase.steps)
        elif phase.tokens is not None:
            tokens_per_step = experiment.train.global_batch_size * experiment.data.sequence_length
            lengths.append(math.ceil(phase.tokens / max(tokens_per_step, 1)))
        elif phase.share is not None and (remaining_phases or not fills_run):
            lengths.append(max(1, min(round(phase.share * total), remaining_steps - remaining_phases)))
        else:
            lengths.append(remaining_steps)
    steps_without_share = sum(n for n, phase in zip(lengths, run.phases, strict=True) if phase.share is None)
    if shares and (claimed := steps_without_share + sum(shares) * total) >= total + 1:
        raise UserError(
            f"config.phases have steps and shares for {claimed:,.0f} steps and config.train.steps is {total:,}: reduce "
            "a share; the last phase may omit its length, and then uses the remaining steps"
        )
    if lengths[-1] < 1:
        raise UserError(
            f"config.phases before the last have {sum(lengths[:-1]):,} steps, config.train.steps is {total:,}: "
            "increase it, or shorten them; a share is a fraction of config.train.steps"
        )
    if sum(lengths) != total:
        sizes = " + ".join(f"{length:,}" for length in lengths)
        raise UserError(
            f"config.phases add up to {sizes} = {sum(lengths):,} steps and config.train.steps is {total:,}: set it to "
            f"{sum(lengths)}, or remove the length of the last phase, so that it uses the remaining steps"
        )
    return lengths


def _phase_config(run: "Experiment", i: int) -> "Experiment":
    """Builds the config of the phase with index `i` (from 0), without phases."""
    phase, plain = run.phases[i], dataclasses.replace(run, phases=())
    for name, target in _OVERRIDES.items():
        if (value := getattr(phase, name)) is None:
            continue
        plain = _replace_field(plain, target, value)
        if name == "weights":
            for field, default in _RESET_WITH_WEIGHTS.items():
                plain = _replace_field(plain, f"data.source.{field}", default)
    adam_rate = getattr(run.optimizer, "adam_learning_rate", None)
    if phase.learning_rate is not None and adam_rate is not None:
        factor = phase.learning_rate / run.optimizer.learning_rate
        plain = _replace_field(plain, "optimizer.adam_learning_rate", adam_rate * factor)
    if phase.source is not None:
        plain.data.source = copy.copy(plain.data.source)
        vars(plain.data.source)["config_path"] = f"config.phases[{i}].source"  # the path in error messages
    return plain


def _replace_field(config: T, path: str, value: object) -> T:
    """Returns a config with the field at `path` replaced; only the sections on this path are copied."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(config, **{name: _replace_field(getattr(config, name), rest, value) if rest else value})


def _get(config: object, path: str) -> object:
    for name in path.split(".") if path else ():
        config = getattr(config, name)
    return config
