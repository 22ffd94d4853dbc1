"""Extends a run past its planned steps, and lists how its completed steps differ from a run of the new length."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pretrainax.config import Experiment, UserError, phase_at, phases_of


def extend(old: Experiment, new: Experiment, done: int, agreed: bool) -> str:
    """Checks the extension of a run from config `old` to `new`, which differ in train.steps; returns a line about it.

    Args:
      done: number of completed steps.
      agreed: the user accepts that completed steps differ from a run of `new`, for example in learning rate.

    Raises:
      UserError: `new` has fewer steps than `old`; or completed steps differ from a run of `new`, without `agreed`.
    """
    before, after = old.train.steps, new.train.steps
    if after < before:
        raise UserError(
            f"config.train.steps is {after}, the run was planned for {before}: steps can be raised, not lowered. "
            "Ctrl-C saves a run and ends it early"
        )
    changes = "; ".join(_changes(old, new, done))
    if changes and not agreed:
        raise UserError(
            f"config.train.steps is raised from {before:,} to {after:,}, but the {done:,} completed steps differ from "
            f"a run planned for {after:,}: {changes}. Add --extend to continue anyway, or set config.train.steps back"
        )
    return f"extended from {before:,} to {after:,} steps" + (f": {changes}" if changes else "")


def _changes(old: Experiment, new: Experiment, done: int) -> Iterator[str]:
    """Yields a description of each difference between the `done` completed steps and the same steps of `new`."""
    yield from _moved_phases(old, new, done)
    rates, longer = _rates(old, done + 1), _rates(new, done + 1)
    if not jnp.array_equal(rates[:done], longer[:done]):
        yield (
            f"the learning rate of step {done + 1:,} is {float(rates[done]):.3g} in the schedule of "
            f"{old.train.steps:,} steps and {float(longer[done]):.3g} in the schedule of {new.train.steps:,} steps "
            f"({type(new.schedule).__name__})"
        )
    started = [phase.experiment for phase in phases_of(old) if phase.start < done]
    sources, objectives = [one.data.source for one in started], [one.objective for one in started]
    starts = [start for source in sources for start, _ in source.weight_stages([1] * len(source.components()))]
    if any(0 < start * old.train.steps < done for start in starts):
        yield "the stages of config.data.source begin at shares of config.train.steps, and a stage has begun"
    changes = [change for objective in objectives for change in _rate_changes(objective)]
    if any(change.begin * old.train.steps < done for change in changes):
        yield "rate_change in config.objective is scheduled by shares of config.train.steps, and has begun"


def _moved_phases(old: Experiment, new: Experiment, done: int) -> Iterator[str]:
    """Yields a description of the first completed step that is in a different phase in `new`; nothing if none is."""
    before, after = phases_of(old), phases_of(new)
    for start in sorted({phase.start for phase in (*before, *after) if phase.start < done}):
        old_phase, new_phase = phase_at(before, start), phase_at(after, start)
        if old_phase.changes != new_phase.changes:
            yield f"step {start + 1:,} was trained in {old_phase}, and would now be in {new_phase}"
            return


def _rates(experiment: Experiment, count: int) -> jax.Array:
    """Returns the learning rates of the first `count` steps of a run, [count]; the last phase has no end."""
    rates = []
    for phase in phases_of(experiment):
        config = phase.experiment
        rate = config.schedule.build(config.optimizer.learning_rate, experiment.train.steps)
        stop = count if phase.stop == experiment.train.steps else min(phase.stop, count)
        rates.append(jax.vmap(rate)(jnp.arange(min(phase.start, stop), stop)))
    return jnp.concatenate(rates)


def _rate_changes(part: object) -> Iterator[Any]:
    """Yields each `rate_change` that is set in an objective or in its nested objectives."""
    if isinstance(part, tuple):
        for item in part:
            yield from _rate_changes(item)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name == "rate_change" and value is not None:
                yield value
            yield from _rate_changes(value)
