"""The interface of adaptations: the model before the adaptation, and the rule of each parameter."""

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, NamedTuple, Optional

import jax
import jax.numpy as jnp

from pretrainax.config import Experiment, ModelConfig, kinds


class Operation(NamedTuple):
    """One operation on a parameter."""

    how: str  # for messages: "8 copies"
    function: Callable[[jax.Array], jax.Array]


class ParameterRule(NamedTuple):
    """The rule of a parameter: its source and the operations on it."""

    source: Optional[str]  # path in the start; None: no source, the parameter is initialized
    made: tuple[Operation, ...] = ()  # in this order; (): the parameter is copied

    def after(self, earlier: Mapping[str, "ParameterRule"]) -> Optional["ParameterRule"]:
        """Composes this rule with the `earlier` rules of its source; None if they do not create the source."""
        if self.source is None:
            return self
        first = earlier.get(self.source)
        return first and ParameterRule(first.source, first.made + self.made)

    @property
    def how(self) -> str:
        """Returns a description of the operations; "" for a copy."""
        return ", then ".join(making.how for making in self.made)

    def applied(self, x: jax.Array) -> jax.Array:
        """Applies the operations to the source; always returns a new array."""
        for making in self.made:
            x = making.function(x)
        return jnp.copy(x)  # two rules may share a source, but a step with a donated state needs separate arrays


class Adaptation(kinds.Adaptation):
    """Base of adaptations. `ours` is the model that the adaptation creates, `theirs` the model of the start."""

    fields: ClassVar[tuple[str, ...]]  # fields of ModelConfig that the adaptation changes
    makes: ClassVar[Optional[str]] = None  # family of the created model; None: unchanged

    def before(self, ours: ModelConfig, theirs: ModelConfig) -> ModelConfig:
        """Returns the model that the adaptation converts to `ours`."""
        raise NotImplementedError

    def mismatches(self, ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
        """Yields a message for each reason that prevents the conversion: value, allowed values, field to set."""
        yield from ()

    def parameter_rule(self, path: str, before: ModelConfig, ours: ModelConfig) -> ParameterRule:
        """Returns the rule of a parameter of `ours`; `before` is the result of `before()`."""
        del before, ours
        return ParameterRule(path)

    def effect(self, before: ModelConfig, ours: ModelConfig) -> str:
        """Describes the effect on the function of the model, for messages."""
        raise NotImplementedError

    def problems(self, experiment: Experiment) -> Iterator[str]:
        checkpoint, model, name = experiment.checkpoint, experiment.model, f"config.checkpoint.adapt has {self}"
        if not checkpoint.init_from:
            yield f"{name}, which gives config.checkpoint.init_from another shape: set it to a run or a directory"
        if experiment.tuning is not None:
            yield f"{name}, and config.tuning keeps its start as it is: train a model of this shape, then tune that"
        if model.generator is not None:
            yield f"{name}, and config.model.generator makes two models: leave one of them out"
        if self.makes not in (None, model.family):
            yield f"{name}, and config.model.family is {model.family!r}: set it to {self.makes!r}"
        if sum(type(other) is type(self) for other in checkpoint.adapt) > 1:
            yield f"{name} and another of its kind: give one"
