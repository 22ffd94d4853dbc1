"""Says what every adaptation of a start has: the model it begins with, and where each parameter comes from."""

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.config import Experiment, ModelConfig, kinds


class Making(NamedTuple):
    """One thing that is done to a parameter on its way."""

    how: str  # for people: "8 copies"
    function: Callable[[jax.Array], jax.Array]


class Way(NamedTuple):
    """Says where a parameter comes from, and what is done to it on the way."""

    source: Optional[str]  # its path there; None: there is none, it is drawn anew
    made: tuple[Making, ...] = ()  # in this order; (): it is copied

    def after(self, earlier: Mapping[str, "Way"]) -> Optional["Way"]:
        """Returns the way from where `earlier` ones began; None: they lead to no such parameter."""
        if self.source is None:
            return self
        first = earlier.get(self.source)
        return first and Way(first.source, first.made + self.made)

    @property
    def how(self) -> str:
        """Returns what is done to it, for people; "" where it is copied."""
        return ", then ".join(making.how for making in self.made)

    def applied(self, x: jax.Array) -> jax.Array:
        """Returns the parameter, of the one at its source, in an array of its own."""
        for making in self.made:
            x = making.function(x)
        return jnp.copy(x)  # two ways may begin at one array, which a step that is donated its state cannot take twice


class Adaptation(kinds.Adaptation):
    """Base of the adaptations. `ours` is a model that one makes, `theirs` the model of the whole start."""

    fields: ClassVar[tuple[str, ...]]  # of ModelConfig, in which the two differ
    makes: ClassVar[Optional[str]] = None  # the family of the model that it makes; None: that which there is

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        """Returns the model whose parameters become those of `ours`."""
        raise NotImplementedError

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        """Yields a line for each thing that keeps `theirs` from becoming `ours`: value got, allowed, field to set."""
        yield from ()

    def way(self, path: str, before: ModelConfig, ours: ModelConfig) -> Way:
        """Returns where the parameter of `ours` at a path comes from, `before` being what `before` returned."""
        del before, ours
        return Way(path)

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        """Says for people what this does to the function that is computed."""
        raise NotImplementedError

    def problems(self, experiment: Experiment) -> Iterator[str]:
        checkpoint, model, name = experiment.checkpoint, experiment.model, f"config.checkpoint.adapt has {self}"
        if not checkpoint.init_from:
            yield f"{name}, which gives config.checkpoint.init_from another shape: set that to a run or a directory"
        if experiment.tuning is not None:
            yield f"{name}, and config.tuning keeps its start as it is: train a model of this shape, and tune that"
        if model.generator is not None:
            yield f"{name}, and config.model.generator makes two models: leave one of them out"
        if self.makes not in (None, model.family):
            yield f"{name}, and config.model.family is {model.family!r}: set it to {self.makes!r}"
        if sum(type(other) is type(self) for other in checkpoint.adapt) > 1:
            yield f"{name} and another of its kind: give one"
