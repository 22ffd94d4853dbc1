"""Extends a run beyond its planned steps, and describes the differences of its completed steps from a longer run."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pretrainax.config import Experiment, UserError, phase_at, phases_of
from pretrainax.files.errors import counted


def extend(old: Experiment, new: Experiment, done: int, agreed: bool) -> str:
    """Checks that a run of config `old` can continue with `new`, which has more train.steps; returns a log message.

    Args:
      done: number of completed steps.
      agreed: whether the user accepts that completed steps were not trained as `new` specifies (learning rate, phase).

    Raises:
      UserError: `new` has fewer steps than `old`, or completed steps differ from `new` and `agreed` is False.
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
    return f"extended from {before:,} to {counted(after, 'step')}" + (f": {changes}" if changes else "")


def _changes(old: Experiment, new: Experiment, done: int) -> Iterator[str]:
    """Describes how the `done` completed steps differ from the same steps in a run that uses `new` from the start."""
    yield from _moved_phases(old, new, done)
    old_rates, new_rates = _rates(old, done + 1), _rates(new, done + 1)
    if not jnp.array_equal(old_rates[:done], new_rates[:done]):
        yield (
            f"the learning rate of step {done + 1:,} is {float(old_rates[done]):.3g} in the schedule of "
            f"{old.train.steps:,} steps and {float(new_rates[done]):.3g} in the schedule of {new.train.steps:,} steps "
            f"({type(new.schedule).__name__})"
        )
    configs = [phase.experiment for phase in phases_of(old) if phase.start < done]
    sources, objectives = [config.data.source for config in configs], [config.objective for config in configs]
    stage_starts = [start for source in sources for start, _ in source.weight_stages([1] * len(source.components()))]
    if any(0 < start * old.train.steps < done for start in stage_starts):
        yield "the stages of config.data.source begin at shares of config.train.steps, and a stage has begun"
    changes = [change for objective in objectives for change in _rate_changes(objective)]
    if any(change.begin * old.train.steps < done for change in changes):
        yield "rate_change in config.objective is scheduled by shares of config.train.steps, and has begun"


def _moved_phases(old: Experiment, new: Experiment, done: int) -> Iterator[str]:
    """Describes the first completed step whose phase is different in `new`; yields nothing if there is none."""
    before, after = phases_of(old), phases_of(new)
    for start in sorted({phase.start for phase in (*before, *after) if phase.start < done}):
        old_phase, new_phase = phase_at(before, start), phase_at(after, start)
        if old_phase.changes != new_phase.changes:
            yield f"step {start + 1:,} was trained in {old_phase}, and would now be in {new_phase}"
            return


def _rates(experiment: Experiment, count: int) -> jax.Array:
    """Computes the learning rates [count] of a run's first `count` steps, as if the last phase never ended."""
    rates = []
    for phase in phases_of(experiment):
        config = phase.experiment
        rate = config.schedule.build(config.optimizer.learning_rate, experiment.train.steps)
        stop = count if phase.stop == experiment.train.steps else min(phase.stop, count)
        rates.append(jax.vmap(rate)(jnp.arange(min(phase.start, stop), stop)))
    return jnp.concatenate(rates)


def _rate_changes(value_or_config: object) -> Iterator[Any]:
    """Yields every `rate_change` that is set in an objective, including its nested objectives."""
    if isinstance(value_or_config, tuple):
        for item in value_or_config:
            yield from _rate_changes(item)
    elif dataclasses.is_dataclass(value_or_config):
        for field in dataclasses.fields(value_or_config):
            value = getattr(value_or_config, field.name)
            if field.name == "rate_change" and value is not None:
                yield value
            yield from _rate_changes(value)
