"""Runs that go on past the steps they were planned for, and what of the steps done is not as in one planned so long."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pretrainax.config import Experiment, UserError, phase_at, phases_of


def extend(old: Experiment, new: Experiment, done: int, agreed: bool) -> str:
    """Returns a line about a run of `old` that goes on as one of `new`, which differs in train.steps.

    Args:
      done: steps of the run so far.
      agreed: the user has asked for what changes on the way, such as the learning rate.

    Raises:
      UserError: fewer steps than planned; or steps done that would have been others, without `agreed`.
    """
    before, after = old.train.steps, new.train.steps
    if after < before:
        raise UserError(
            f"config.train.steps is {after}, the run was planned for {before}: steps can be raised, not lowered; a "
            "signal (Ctrl-C) ends a run early, and saves it"
        )
    changes = "; ".join(_changes(old, new, done))
    if changes and not agreed:
        raise UserError(
            f"config.train.steps is raised from {before:,} to {after:,}, and the {done:,} steps done are not those of "
            f"a run planned so: {changes}. Add --extend to go on like that, or set config.train.steps back"
        )
    return f"extended from {before:,} to {after:,} steps" + (f": {changes}" if changes else "")


def _changes(old: Experiment, new: Experiment, done: int) -> Iterator[str]:
    """Yields a line for each thing that depends on train.steps and was not what it would have been in `new`."""
    yield from _moved_phases(old, new, done)
    rates, longer = _rates(old, done + 1), _rates(new, done + 1)
    if not jnp.array_equal(rates[:done], longer[:done]):
        yield (
            f"the learning rate of step {done + 1:,} is {float(rates[done]):.3g} by the schedule of "
            f"{old.train.steps:,} steps and {float(longer[done]):.3g} by that of {new.train.steps:,} "
            f"({type(new.schedule).__name__})"
        )
    begun = [phase.experiment for phase in phases_of(old) if phase.start < done]
    sources, objectives = [one.data.source for one in begun], [one.objective for one in begun]
    starts = [start for source in sources for start, _ in source.weight_stages([1] * len(source.components()))]
    if any(0 < start * old.train.steps < done for start in starts):
        yield "the stages of config.data.source begin at shares of config.train.steps, of which one has passed"
    changes = [change for objective in objectives for change in _rate_changes(objective)]
    if any(change.begin * old.train.steps < done for change in changes):
        yield "rate_change in config.objective goes by shares of config.train.steps, and has begun"


def _moved_phases(old: Experiment, new: Experiment, done: int) -> Iterator[str]:
    """Yields a line where the first of the steps done that would be trained otherwise is."""
    before, after = phases_of(old), phases_of(new)
    for start in sorted({phase.start for phase in (*before, *after) if phase.start < done}):
        was, would_be = phase_at(before, start), phase_at(after, start)
        if was.changes != would_be.changes:
            yield f"step {start + 1:,} was made in {was}, and would be of {would_be}"
            return


def _rates(experiment: Experiment, count: int) -> jax.Array:
    """Returns the learning rates of the first steps of a run, also of those after its end."""
    found = []
    for phase in phases_of(experiment):
        trained = phase.experiment
        rate = trained.schedule.build(trained.optimizer.learning_rate, experiment.train.steps)
        stop = count if phase.stop == experiment.train.steps else min(phase.stop, count)
        found.append(jax.vmap(rate)(jnp.arange(min(phase.start, stop), stop)))
    return jnp.concatenate(found)


def _rate_changes(part: object) -> Iterator[Any]:
    """Yields each rate_change of an objective and of those within it."""
    if isinstance(part, tuple):
        for item in part:
            yield from _rate_changes(item)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name == "rate_change" and value is not None:
                yield value
            yield from _rate_changes(value)
