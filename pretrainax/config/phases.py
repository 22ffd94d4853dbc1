"""Divides a run into phases: each is the run's config with other values of some fields, for a part of its steps.

What trains, plans or shows a phase sees one plain `Experiment`, which has no phases: `phases_of` gives them.
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional, Protocol, TypeVar

from pretrainax.config.choice import Choice, written
from pretrainax.files.errors import UserError

if TYPE_CHECKING:  # with their methods
    from _typeshed import DataclassInstance

    from pretrainax.config.experiment import Experiment
    from pretrainax.data.objectives import Objective
    from pretrainax.data.sources import Source
else:
    from pretrainax.config.kinds import Objective, Source

T = TypeVar("T", bound="DataclassInstance")
P = TypeVar("P", bound="_WithStop")

_SETS = {  # a field of a phase: the field of the config that it stands for
    "sequence_length": "data.sequence_length",
    "global_batch_size": "train.global_batch_size",
    "accumulate": "train.accumulate",
    "learning_rate": "optimizer.learning_rate",
    "dropout_rate": "model.dropout_rate",
    "theta": "model.position.theta",
    "source": "data.source",
    "weights": "data.source.weights",
    "objective": "objective",
}
_BESIDE_WEIGHTS = {"stages": (), "temperature": 1.0, "limit": None}  # of a mixture whose weights a phase gives
_LENGTHS = ("steps", "tokens", "share")


@dataclasses.dataclass
class Phase(Choice):
    """A part of a run: how long it is, and which fields of the config are others in it.

    One of `steps`, `tokens` and `share` says how long; the last phase may leave it to `train.steps`. Learning rates go
    by the schedule of the whole run. What is validated is the config's own in all phases, so that figures compare.
    """

    steps: Optional[int] = None  # updates
    tokens: Optional[float] = None  # that its rows have room for: global_batch_size times sequence_length a step
    share: Optional[float] = None  # of train.steps
    sequence_length: Optional[int] = None  # here and below, None: as the config says
    global_batch_size: Optional[int] = None  # examples of one update
    accumulate: Optional[int] = None  # micro-batches of one update
    learning_rate: Optional[float] = None  # peak of the schedule
    dropout_rate: Optional[float] = None  # of the model
    theta: Optional[float] = None  # base of the rotary positions
    source: Optional[Source] = None  # where documents come from; the tokenizer stays that of the config's source
    weights: Optional[tuple[float, ...]] = None  # of the sources of a SourceMixture, in place of its weights and stages
    objective: Optional[Objective] = None  # what the model is asked to predict

    def changes(self) -> str:
        """Names what is other than in the config: "sequence_length 128, dropout_rate 0.0"; empty where nothing is."""
        given = {name: getattr(self, name) for name in _SETS}
        return ", ".join(f"{name} {written(value)}" for name, value in given.items() if value is not None)


class RunPhase(NamedTuple):
    """A phase of a run as it is trained."""

    number: int  # from 1
    start: int  # updates before it
    stop: int  # updates at its end
    experiment: "Experiment"  # without phases; train.steps are those of the whole run
    changes: str  # what is other than in the run's config

    @property
    def steps(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        return f"phase {self.number}"

    @property
    def what(self) -> str:
        """Returns its steps, and what is other in them than in the run's config."""
        return f"steps {self.start + 1:,} to {self.stop:,}: {self.changes or 'as the config says'}"

    def __str__(self) -> str:
        return f"{self.name}, {self.what}"


def phases_of(experiment: "Experiment") -> tuple[RunPhase, ...]:
    """Returns the phases of a run in their order; of one without phases, one of all its steps.

    Raises:
      UserError: phases that do not add up to the steps of the run.
    """
    if not experiment.phases:
        return (RunPhase(1, 0, experiment.train.steps, experiment, ""),)
    plain = [_plain(experiment, i) for i in range(len(experiment.phases))]
    found, start = [], 0
    for i, length in enumerate(_lengths(experiment, plain)):
        found.append(RunPhase(i + 1, start, start + length, plain[i], experiment.phases[i].changes()))
        start += length
    return tuple(found)


class _WithStop(Protocol):
    """A phase, or what is made of one."""

    @property
    def stop(self) -> int: ...


def phase_at(phases: Sequence[P], step: int) -> P:
    """Returns the phase of the update after `step` updates; after the end of the run the last."""
    return next((phase for phase in phases if step < phase.stop), phases[-1])


@contextlib.contextmanager
def naming(phase: RunPhase) -> Iterator[None]:
    """Names the phase in an error line, of a run that has several."""
    try:
        yield
    except UserError as e:
        if phase.experiment.phases or not phase.changes:  # it is the run itself, or as that is
            raise
        raise type(e)(f"phase {phase.number} of config.phases ({phase.changes}): {e}") from e


def trained_as(experiment: "Experiment", steps: Sequence[int]) -> "Experiment":
    """Returns the config, without phases, of the phase that the newest of some checkpoints was made in.

    Args:
      steps: updates made until each of the checkpoints.

    Raises:
      UserError: phases whose models compute otherwise, so that their parameters have no average.
    """
    if not experiment.phases:
        return experiment
    phases = phases_of(experiment)
    found = [phase_at(phases, max(step - 1, 0)) for step in sorted(steps)]
    positions = {str(phase.experiment.model.position) for phase in found}
    if len(positions) > 1:
        raise UserError(
            f"the checkpoints {', '.join(map(str, sorted(steps)))} are of phases with other positions "
            f"({' and '.join(sorted(positions))}), whose parameters have no average: take those of one phase"
        )
    return found[-1].experiment


def problems_of_phases(experiment: "Experiment") -> Iterator[str]:
    """Yields a line for each phase that is none, and where they do not add up to the run."""
    own = list(_field_problems(experiment))
    yield from own
    if not own and experiment.phases:
        try:
            phases_of(experiment)
        except UserError as e:
            yield str(e)


def _field_problems(experiment: "Experiment") -> Iterator[str]:
    for i, phase in enumerate(experiment.phases):
        path, given = f"config.phases[{i}]", [name for name in _LENGTHS if getattr(phase, name) is not None]
        if len(given) > 1:
            yield f"{path} has {' and '.join(given)}: give one of them"
        if not given and i + 1 < len(experiment.phases):
            yield f"{path} has no length: give steps, tokens or share, which only the last phase may leave out"
        if phase.share is not None and not 0 < phase.share < 1:
            yield f"{path}.share is {phase.share}, it must be between 0 and 1"
        for name in ("steps", "tokens"):
            if (value := getattr(phase, name)) is not None and value < 1:
                yield f"{path}.{name} is {value}, it must be at least 1"
        for name, target in _SETS.items():
            owner, _, field = target.rpartition(".")
            holder = _get(experiment, owner) if name != "weights" or phase.source is None else phase.source
            if getattr(phase, name) is not None and not hasattr(holder, field):
                yield f"{path}.{name} sets config.{target}, which {type(holder).__name__} does not have: leave it out"


def _lengths(run: "Experiment", plain: Sequence["Experiment"]) -> list[int]:
    """Returns the steps of each phase. A share is rounded, and leaves each phase a step."""
    total, lengths = run.train.steps, []
    shares = [phase.share for phase in run.phases if phase.share is not None]
    is_whole = len(shares) == len(run.phases) and math.isclose(sum(shares), 1)
    for phase, experiment in zip(run.phases, plain, strict=True):
        left, after = total - sum(lengths), len(run.phases) - len(lengths) - 1
        if phase.steps is not None:
            lengths.append(phase.steps)
        elif phase.tokens is not None:
            room = experiment.train.global_batch_size * experiment.data.sequence_length
            lengths.append(math.ceil(phase.tokens / max(room, 1)))
        elif phase.share is not None and (after or not is_whole):
            lengths.append(max(1, min(round(phase.share * total), left - after)))
        else:
            lengths.append(left)
    if lengths[-1] < 1:
        raise UserError(
            f"config.phases before the last take {sum(lengths[:-1]):,} steps, config.train.steps is {total:,}: raise it"
            ", or make them shorter; a share goes by config.train.steps"
        )
    if sum(lengths) != total:
        sizes = " + ".join(f"{length:,}" for length in lengths)
        raise UserError(
            f"config.phases add up to {sizes} = {sum(lengths):,} steps and config.train.steps is {total:,}: set it to "
            f"{sum(lengths)}, or give the last phase no length, which then takes what is left"
        )
    return lengths


def _plain(run: "Experiment", i: int) -> "Experiment":
    """Returns the config of phase i."""
    phase, plain = run.phases[i], dataclasses.replace(run, phases=())
    for name, target in _SETS.items():
        if (value := getattr(phase, name)) is None:
            continue
        plain = _with(plain, target, value)
        if name == "weights":
            for field, default in _BESIDE_WEIGHTS.items():
                plain = _with(plain, f"data.source.{field}", default)
    if phase.source is not None:
        plain.data.source = copy.copy(plain.data.source)
        vars(plain.data.source)["config_path"] = f"config.phases[{i}].source"  # where error lines say its fields are
    return plain


def _with(config: T, path: str, value: object) -> T:
    """Returns a config with another value of a field; neither it nor a part of it that changes is the old object."""
    name, _, rest = path.partition(".")
    return dataclasses.replace(config, **{name: _with(getattr(config, name), rest, value) if rest else value})


def _get(config: object, path: str) -> object:
    for name in path.split(".") if path else ():
        config = getattr(config, name)
    return config
