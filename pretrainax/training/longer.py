"""Runs that go on past the steps they were planned for, and what of the steps done is not as in one planned so long."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pretrainax.config import Experiment, UserError
from pretrainax.optim.schedules import Rate


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
    rates, longer = _rate(old), _rate(new)
    steps = jnp.arange(done)
    if not jnp.array_equal(jax.vmap(rates)(steps), jax.vmap(longer)(steps)):
        yield (
            f"the learning rate of step {done + 1:,} is {float(rates(done)):.3g} by the schedule of "
            f"{old.train.steps:,} steps and {float(longer(done)):.3g} by that of {new.train.steps:,} "
            f"({type(new.schedule).__name__})"
        )
    source = old.data.source
    starts = [start for start, _ in source.weight_stages([1] * len(source.components()))]
    if any(0 < start * old.train.steps < done for start in starts):
        yield "the stages of config.data.source begin at shares of config.train.steps, of which one has passed"
    begun = [change for change in _rate_changes(old.objective) if change.begin * old.train.steps < done]
    if begun:
        yield "rate_change in config.objective goes by shares of config.train.steps, and has begun"


def _rate(experiment: Experiment) -> Rate:
    return experiment.schedule.build(experiment.optimizer.learning_rate, experiment.train.steps)


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
